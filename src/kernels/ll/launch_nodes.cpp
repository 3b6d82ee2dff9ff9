// SPDX-License-Identifier: Apache-2.0
// The low-latency kernels once more, for groups of several load/store domains (CROSSDOCK_SEVERAL_DOMAINS is defined for
// this file).
#include "kernels/ll/combine_on_cpu.h"
#include "kernels/ll/dispatch.h"
#include "kernels/ll/launch.h"
#include "runtime/cpu/executor.h"

namespace crossdock::nodes {

static_assert(kSeveralDomains, "this file is compiled with CROSSDOCK_SEVERAL_DOMAINS");

void launch_ll_dispatch(Runtime& runtime, const LlDispatchArgs& args, LaunchShape shape, cudaStream_t) {
    runtime.cpu_executor()->run(shape, [&](cpu::Warp& warp) { ll_dispatch(Ctx(warp), args); });
}

void launch_ll_combine(Runtime& runtime, const LlCombineArgs& args, LaunchShape shape, cudaStream_t) {
    runtime.cpu_executor()->run(shape, [&](cpu::Warp& warp) { run_ll_combine(Ctx(warp), args); });
}

void launch_ll_mask_clean(Runtime& runtime, const LlMaskCleanArgs& args, cudaStream_t) {
    const LaunchShape shape{1, 1, sizeof(uint64_t)};
    runtime.cpu_executor()->run(shape, [&](cpu::Warp& warp) { ll_mask_clean(Ctx(warp), args); });
}

}  // namespace crossdock::nodes
