// SPDX-License-Identifier: Apache-2.0
// The GPU's entry points of the low-latency kernels for groups of several load/store domains (CROSSDOCK_GIN_PEERS
// is defined for this file).
#include <cuda_runtime.h>

#include "kernels/ll/combine.h"
#include "kernels/ll/dispatch.h"
#include "kernels/ll/launch.h"
#include "runtime/cuda/launch.cuh"

namespace crossdock::cuda::nodes {
namespace {

static_assert(kHasGinPeers, "this file is compiled with CROSSDOCK_GIN_PEERS");

constexpr int kMostThreads = 512;

__global__ void __launch_bounds__(kMostThreads, 1)
    crossdock_ll_nodes_dispatch(const __grid_constant__ LlDispatchArgs args) {
    ll_dispatch(Ctx{}, args);
}

template <DType kDType>
__global__ void __launch_bounds__(kMostThreads, 1)
    crossdock_ll_nodes_combine(const __grid_constant__ LlCombineArgs args) {
    ll_combine<kDType, RowForms::kBoth>(Ctx{}, args);
}

__global__ void crossdock_ll_nodes_mask_clean(const __grid_constant__ LlMaskCleanArgs args) {
    ll_mask_clean(Ctx{}, args);
}

}  // namespace

void launch_ll_dispatch(const LlDispatchArgs& args, LaunchShape shape, cudaStream_t stream) {
    launch<crossdock_ll_nodes_dispatch>(args, shape, stream, "LL dispatch between nodes");
}

void launch_ll_combine(const LlCombineArgs& args, LaunchShape shape, cudaStream_t stream) {
    switch (args.dtype) {
        case DType::kBf16:
            return launch<crossdock_ll_nodes_combine<DType::kBf16>>(args, shape, stream, "LL combine between nodes");
        case DType::kF16:
            return launch<crossdock_ll_nodes_combine<DType::kF16>>(args, shape, stream, "LL combine between nodes");
        case DType::kF32:
            return launch<crossdock_ll_nodes_combine<DType::kF32>>(args, shape, stream, "LL combine between nodes");
    }
}

void launch_ll_mask_clean(const LlMaskCleanArgs& args, LaunchShape shape, cudaStream_t stream) {
    launch<crossdock_ll_nodes_mask_clean>(args, shape, stream, "mask clean between nodes");
}

}  // namespace crossdock::cuda::nodes
