// SPDX-License-Identifier: Apache-2.0
// The GPU's entry points of the low-latency combine, as dispatch.cu, and of the short kernels beside both. Compiled
// twice (platform.h: Peers).
#include <cuda_runtime.h>

#include <type_traits>

#include "kernels/ll/combine_receive.h"
#include "kernels/ll/launch.h"
#include "kernels/ll/variants.h"
#include "runtime/cuda/launch.cuh"
#if defined(CROSSDOCK_TIMELINE) && !defined(CROSSDOCK_GIN_PEERS)
#include "kernels/ll/timeline_file.cuh"
#endif

namespace crossdock {
namespace {

template <DType kDType, RowForms kForms, typename Args, Peers>
__global__ void __launch_bounds__(kMostLlThreads, 1) crossdock_ll_combine(const __grid_constant__ Args args) {
    ll_combine<kDType, kForms>(Ctx{}, args);
}

template <Peers>
__global__ void crossdock_ll_mask_clean(const __grid_constant__ LlMaskCleanArgs args) {
    ll_mask_clean(Ctx{}, args);
}

}  // namespace

static void launch_on_gpu(LlCombine, const LlCombineArgs& args, const LaunchShape& shape, cudaStream_t stream) {
    with_combine_variant(args, [&]<DType kDType, typename Args>(const Args& known) {
        const auto run = [&]<RowForms kForms>() {
            cuda::launch<crossdock_ll_combine<kDType, kForms, Args, kPeers>>(known, shape, stream, LlCombine::kName);
        };
        if constexpr (!std::is_same_v<Args, LlCombineArgs>) {
            run.template operator()<Args::forms>();
        } else if constexpr (kHasGinPeers) {
            run.template operator()<RowForms::kBoth>();
        } else {
            known.forms == RowForms::kLl128 ? run.template operator()<RowForms::kLl128>()
                                            : run.template operator()<RowForms::kBoth>();
        }
    });
}

static void launch_on_gpu(LlMaskClean, const LlMaskCleanArgs& args, const LaunchShape& shape, cudaStream_t stream) {
    cuda::launch<crossdock_ll_mask_clean<kPeers>>(args, shape, stream, LlMaskClean::kName);
}

template struct OnGpu<LlCombine, kPeers>;
template struct OnGpu<LlMaskClean, kPeers>;

}  // namespace crossdock

#if !defined(CROSSDOCK_GIN_PEERS)  // compiled once
namespace crossdock {
namespace {

__global__ void __launch_bounds__(kMostLlThreads, 1) crossdock_ll_sources(const __grid_constant__ LlSourcesArgs args) {
    ll_sources(Ctx{}, args);
}

}  // namespace

static void launch_on_gpu(LlSources, const LlSourcesArgs& args, const LaunchShape& shape, cudaStream_t stream) {
    cuda::launch<crossdock_ll_sources>(args, shape, stream, LlSources::kName);
}

template struct OnGpu<LlSources, kPeers>;

#if defined(CROSSDOCK_TIMELINE)
void cuda::write_combine_times(int rank) {
    write_steps(rank, "combine", Step::kCombineBegin, kCombineSteps, std::ios::app);
}
#endif

}  // namespace crossdock
#endif
