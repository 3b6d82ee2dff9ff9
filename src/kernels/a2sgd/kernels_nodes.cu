// SPDX-License-Identifier: Apache-2.0
// The GPU's entry points of A2SGD for several load/store domains (CROSSDOCK_GIN_PEERS is defined for this file).
#include <cuda_runtime.h>

#include "kernels/a2sgd/launch.h"
#include "kernels/a2sgd/means.h"
#include "kernels/a2sgd/sums.h"
#include "runtime/cuda/launch.cuh"

namespace crossdock::cuda::nodes {
namespace {

static_assert(kHasGinPeers, "this file is compiled with CROSSDOCK_GIN_PEERS");

constexpr int kMostThreads = 256;

template <typename Sum>
__global__ void __launch_bounds__(kMostThreads, 2) crossdock_a2sgd_nodes_sums(const __grid_constant__ A2sgdArgs args) {
    a2sgd_sums<Sum>(Ctx{}, args);
}

__global__ void __launch_bounds__(kMostThreads, 1) crossdock_a2sgd_nodes_means(const __grid_constant__ A2sgdArgs args) {
    a2sgd_means(Ctx{}, args);
}

}  // namespace

void launch_a2sgd_sums(const A2sgdArgs& args, LaunchShape shape, cudaStream_t stream) {
    if (args.sums_in_fp64)
        return launch<crossdock_a2sgd_nodes_sums<double>>(args, shape, stream, "A2SGD sums between nodes");
    launch<crossdock_a2sgd_nodes_sums<float>>(args, shape, stream, "A2SGD sums between nodes");
}

void launch_a2sgd_means(const A2sgdArgs& args, LaunchShape shape, cudaStream_t stream) {
    launch<crossdock_a2sgd_nodes_means>(args, shape, stream, "A2SGD means between nodes");
}

}  // namespace crossdock::cuda::nodes
