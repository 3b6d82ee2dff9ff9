// SPDX-License-Identifier: Apache-2.0
// The GPU's entry points of A2SGD. Compiled twice (platform.h: Peers).
#include <cuda_runtime.h>

#include "a2sgd/kernels/apply.h"
#include "a2sgd/kernels/launch.h"
#include "a2sgd/kernels/means.h"
#include "a2sgd/kernels/sums.h"
#include "runtime/cuda/launch.cuh"

namespace crossdock {
namespace {

constexpr int kMostThreads = 256;

template <typename Sum, Peers>
__global__ void __launch_bounds__(kMostThreads, 2) crossdock_a2sgd_sums(const __grid_constant__ A2sgdArgs args) {
    a2sgd_sums<Sum>(Ctx{}, args);
}

template <Peers>
__global__ void __launch_bounds__(kMostThreads, 1) crossdock_a2sgd_means(const __grid_constant__ A2sgdArgs args) {
    a2sgd_means(Ctx{}, args);
}

}  // namespace

static void launch_on_gpu(A2sgdSumsKernel, const A2sgdArgs& args, const LaunchShape& shape, cudaStream_t stream) {
    if (args.sums_in_fp64)
        return cuda::launch<crossdock_a2sgd_sums<double, kPeers>>(args, shape, stream, A2sgdSumsKernel::kName);
    cuda::launch<crossdock_a2sgd_sums<float, kPeers>>(args, shape, stream, A2sgdSumsKernel::kName);
}

static void launch_on_gpu(A2sgdMeansKernel, const A2sgdArgs& args, const LaunchShape& shape, cudaStream_t stream) {
    cuda::launch<crossdock_a2sgd_means<kPeers>>(args, shape, stream, A2sgdMeansKernel::kName);
}

template struct OnGpu<A2sgdSumsKernel, kPeers>;
template struct OnGpu<A2sgdMeansKernel, kPeers>;

}  // namespace crossdock

#if !defined(CROSSDOCK_GIN_PEERS)  // compiled once
namespace crossdock {
namespace {

__global__ void __launch_bounds__(kMostThreads, 2) crossdock_a2sgd_apply(const __grid_constant__ A2sgdArgs args) {
    a2sgd_apply(Ctx{}, args);
}

}  // namespace

static void launch_on_gpu(A2sgdApplyKernel, const A2sgdArgs& args, const LaunchShape& shape, cudaStream_t stream) {
    cuda::launch<crossdock_a2sgd_apply>(args, shape, stream, A2sgdApplyKernel::kName);
}

template struct OnGpu<A2sgdApplyKernel, kPeers>;

}  // namespace crossdock
#endif
