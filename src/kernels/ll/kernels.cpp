// SPDX-License-Identifier: Apache-2.0
// The low-latency kernels on CPUs. Compiled twice (platform.h: Peers).
#include "kernels/ll/combine_receive.h"
#include "kernels/ll/dispatch_receive.h"
#include "kernels/ll/launch.h"
#include "kernels/ll/variants.h"
#include "runtime/cpu/executor.h"

namespace crossdock {

template <>
void OnCpu<LlDispatch, kPeers>::launch(cpu::Executor& executor, const LlDispatchArgs& args, const LaunchShape& shape) {
    with_dispatch_variant(
        args, [&](const auto& known) { executor.run(shape, [&](cpu::Warp& warp) { ll_dispatch(Ctx(warp), known); }); });
}

// CPUs choose the form of rows as they go.
template <>
void OnCpu<LlCombine, kPeers>::launch(cpu::Executor& executor, const LlCombineArgs& args, const LaunchShape& shape) {
    with_combine_variant(args, [&](const auto& known) {
        with_dtype(args.dtype, [&]<DType kDType>() {
            executor.run(shape, [&](cpu::Warp& warp) { ll_combine<kDType, RowForms::kBoth>(Ctx(warp), known); });
        });
    });
}

template <>
void OnCpu<LlMaskClean, kPeers>::launch(cpu::Executor& executor, const LlMaskCleanArgs& args,
                                        const LaunchShape& shape) {
    executor.run(shape, [&](cpu::Warp& warp) { ll_mask_clean(Ctx(warp), args); });
}

template <>
void OnCpu<LlSources, kPeers>::launch(cpu::Executor& executor, const LlSourcesArgs& args, const LaunchShape& shape) {
    executor.run(shape, [&](cpu::Warp& warp) { ll_sources(Ctx(warp), args); });
}

}  // namespace crossdock
