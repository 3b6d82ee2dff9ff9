// SPDX-License-Identifier: Apache-2.0
// The low-latency kernels on CPUs. Compiled twice (platform.h: Peers).
#include "kernels/ll/combine_receive.h"
#include "kernels/ll/dispatch_receive.h"
#include "kernels/ll/launch.h"
#include "kernels/ll/variants.h"
#include "runtime/cpu/launch.h"

namespace crossdock {
inline namespace CROSSDOCK_VARIANT {

template <Peers kReached>
void run_on_cpu(LlDispatch, cpu::Executor& executor, const LlDispatchArgs& args, const LaunchShape& shape) {
    const auto run = [&](const auto& known) {
        executor.run(shape, [&](cpu::Warp& warp) { ll_dispatch(Ctx(warp), known); });
    };
    if constexpr (kReached == Peers::kLsa) {
        with_dispatch_variant(args, run);
    } else {
        run(args);
    }
}

// CPUs choose the form of rows as they go.
template <Peers kReached>
void run_on_cpu(LlCombine, cpu::Executor& executor, const LlCombineArgs& args, const LaunchShape& shape) {
    const auto run = [&](const auto& known) {
        with_dtype(args.dtype, [&]<DType kDType>() {
            executor.run(shape, [&](cpu::Warp& warp) { ll_combine<kDType, RowForms::kBoth>(Ctx(warp), known); });
        });
    };
    if constexpr (kReached == Peers::kLsa) {
        with_combine_variant(args, run);
    } else {
        run(args);
    }
}

template <Peers>
void run_on_cpu(LlMaskClean, cpu::Executor& executor, const LlMaskCleanArgs& args, const LaunchShape& shape) {
    executor.run(shape, [&](cpu::Warp& warp) { ll_mask_clean(Ctx(warp), args); });
}

template <Peers>
void run_on_cpu(LlSources, cpu::Executor& executor, const LlSourcesArgs& args, const LaunchShape& shape) {
    executor.run(shape, [&](cpu::Warp& warp) { ll_sources(Ctx(warp), args); });
}

}  // namespace CROSSDOCK_VARIANT

template struct OnCpu<LlDispatch, kPeers>;
template struct OnCpu<LlCombine, kPeers>;
template struct OnCpu<LlMaskClean, kPeers>;
template struct OnCpu<LlSources, kPeers>;

}  // namespace crossdock
