// SPDX-License-Identifier: Apache-2.0
// The low-latency combine on CPUs, and the short kernels beside it and the dispatch. Compiled twice (platform.h:
// Peers).
#include "kernels/ll/combine_receive.h"
#include "kernels/ll/launch.h"
#include "kernels/ll/variants.h"
#include "runtime/cpu/launch.h"

namespace crossdock {

// Rows may have both forms (the arena has room for few LL128 rows), so there is one kernel for both.
static void run_on_cpu(LlCombine, cpu::Executor& executor, const LlCombineArgs& args, const LaunchShape& shape) {
    with_combine_variant(args, [&]<DType kDType>(const auto& known) {
        executor.run(shape, [&](cpu::Warp& warp) { ll_combine<kDType, RowForms::kBoth>(Ctx(warp), known); });
    });
}

static void run_on_cpu(LlMaskClean, cpu::Executor& executor, const LlMaskCleanArgs& args, const LaunchShape& shape) {
    executor.run(shape, [&](cpu::Warp& warp) { ll_mask_clean(Ctx(warp), args); });
}

template struct OnCpu<LlCombine, kPeers>;
template struct OnCpu<LlMaskClean, kPeers>;

#if !defined(CROSSDOCK_GIN_PEERS)  // compiled once
static void run_on_cpu(LlSources, cpu::Executor& executor, const LlSourcesArgs& args, const LaunchShape& shape) {
    executor.run(shape, [&](cpu::Warp& warp) { ll_sources(Ctx(warp), args); });
}
template struct OnCpu<LlSources, kPeers>;
#endif

}  // namespace crossdock
