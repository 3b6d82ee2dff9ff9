// SPDX-License-Identifier: Apache-2.0
// The GPU's entry points of the high-throughput kernels for groups of several load/store domains
// (CROSSDOCK_GIN_PEERS is defined for this file).
#include "kernels/ht/combine.h"
#include "kernels/ht/dispatch.h"
#include "kernels/ht/launch.h"
#include "kernels/ht/update.h"
#include "runtime/cuda/launch.cuh"

namespace crossdock::cuda::nodes {
namespace {

static_assert(kHasGinPeers, "this file is compiled with CROSSDOCK_GIN_PEERS");

constexpr int kMostThreads = 640;

__global__ void __launch_bounds__(kMostThreads, 1)
    crossdock_ht_nodes_update(const __grid_constant__ HtUpdateArgs args) {
    ht_update(Ctx{}, args);
}

__global__ void __launch_bounds__(kMostThreads, 1)
    crossdock_ht_nodes_dispatch_kernel(const __grid_constant__ HtDispatchArgs args) {
    ht_dispatch(Ctx{}, args);
}

template <DType kDType>
__global__ void __launch_bounds__(kMostThreads, 1)
    crossdock_ht_nodes_combine_kernel(const __grid_constant__ HtCombineArgs args) {
    ht_combine<kDType>(Ctx{}, args);
}

}  // namespace

void launch_ht_update(const HtUpdateArgs& args, LaunchShape shape, cudaStream_t stream) {
    launch<crossdock_ht_nodes_update>(args, shape, stream, "HT update between nodes");
}

void launch_ht_dispatch(const HtDispatchArgs& args, LaunchShape shape, cudaStream_t stream) {
    launch<crossdock_ht_nodes_dispatch_kernel>(args, shape, stream, "HT dispatch between nodes");
}

void launch_ht_combine(const HtCombineArgs& args, LaunchShape shape, cudaStream_t stream) {
    switch (args.dtype) {
        case DType::kBf16:
            return launch<crossdock_ht_nodes_combine_kernel<DType::kBf16>>(args, shape, stream,
                                                                           "HT combine between nodes");
        case DType::kF16:
            return launch<crossdock_ht_nodes_combine_kernel<DType::kF16>>(args, shape, stream,
                                                                          "HT combine between nodes");
        case DType::kF32:
            return launch<crossdock_ht_nodes_combine_kernel<DType::kF32>>(args, shape, stream,
                                                                          "HT combine between nodes");
    }
}

}  // namespace crossdock::cuda::nodes
