// SPDX-License-Identifier: Apache-2.0
// The low-latency dispatch on CPUs. Compiled twice (platform.h: Peers).
#include "kernels/ll/dispatch_receive.h"
#include "kernels/ll/launch.h"
#include "kernels/ll/variants.h"
#include "runtime/cpu/launch.h"

namespace crossdock {

static void run_on_cpu(LlDispatch, cpu::Executor& executor, const LlDispatchArgs& args, const LaunchShape& shape) {
    with_dispatch_variant(
        args, [&](const auto& known) { executor.run(shape, [&](cpu::Warp& warp) { ll_dispatch(Ctx(warp), known); }); });
}

template struct OnCpu<LlDispatch, kPeers>;

}  // namespace crossdock
