// SPDX-License-Identifier: Apache-2.0
// The GPU's entry points of A2SGD.
#include <cuda_runtime.h>

#include "kernels/a2sgd/apply.h"
#include "kernels/a2sgd/launch.h"
#include "kernels/a2sgd/means.h"
#include "kernels/a2sgd/sums.h"
#include "runtime/cuda/launch.cuh"

namespace crossdock::cuda {
namespace {

constexpr int kMostThreads = 256;

template <typename Sum>
__global__ void __launch_bounds__(kMostThreads, 2) crossdock_a2sgd_sums(const __grid_constant__ A2sgdArgs args) {
    a2sgd_sums<Sum>(Ctx{}, args);
}

__global__ void __launch_bounds__(kMostThreads, 1) crossdock_a2sgd_means(const __grid_constant__ A2sgdArgs args) {
    a2sgd_means(Ctx{}, args);
}

__global__ void __launch_bounds__(kMostThreads, 2) crossdock_a2sgd_apply(const __grid_constant__ A2sgdArgs args) {
    a2sgd_apply(Ctx{}, args);
}

}  // namespace

void launch_a2sgd_sums(const A2sgdArgs& args, LaunchShape shape, cudaStream_t stream) {
    if (args.sums_in_fp64) return launch<crossdock_a2sgd_sums<double>>(args, shape, stream, "A2SGD sums");
    launch<crossdock_a2sgd_sums<float>>(args, shape, stream, "A2SGD sums");
}

void launch_a2sgd_means(const A2sgdArgs& args, LaunchShape shape, cudaStream_t stream) {
    launch<crossdock_a2sgd_means>(args, shape, stream, "A2SGD means");
}

void launch_a2sgd_apply(const A2sgdArgs& args, LaunchShape shape, cudaStream_t stream) {
    launch<crossdock_a2sgd_apply>(args, shape, stream, "A2SGD apply");
}

}  // namespace crossdock::cuda
