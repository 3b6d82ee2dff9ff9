// SPDX-License-Identifier: Apache-2.0
// The low-latency kernels once more, for groups of several load/store domains (CROSSDOCK_GIN_PEERS is defined for
// this file).
#include "kernels/ll/combine_on_cpu.h"
#include "kernels/ll/dispatch.h"
#include "kernels/ll/launch.h"
#include "runtime/cpu/executor.h"

namespace crossdock::nodes {

static_assert(kHasGinPeers, "this file is compiled with CROSSDOCK_GIN_PEERS");

void launch_ll_dispatch(Runtime& runtime, const LlDispatchArgs& args, LaunchShape shape,
                        [[maybe_unused]] cudaStream_t stream) {
    if (cpu::Executor* executor = runtime.cpu_executor()) {
        executor->run(shape, [&](cpu::Warp& warp) { ll_dispatch(Ctx(warp), args); });
        return;
    }
#if defined(CROSSDOCK_WITH_CUDA)
    cuda::nodes::launch_ll_dispatch(args, shape, stream);
#endif
}

void launch_ll_combine(Runtime& runtime, const LlCombineArgs& args, LaunchShape shape,
                       [[maybe_unused]] cudaStream_t stream) {
    if (cpu::Executor* executor = runtime.cpu_executor()) {
        executor->run(shape, [&](cpu::Warp& warp) { run_ll_combine(Ctx(warp), args); });
        return;
    }
#if defined(CROSSDOCK_WITH_CUDA)
    cuda::nodes::launch_ll_combine(args, shape, stream);
#endif
}

void launch_ll_mask_clean(Runtime& runtime, const LlMaskCleanArgs& args, [[maybe_unused]] cudaStream_t stream) {
    LaunchShape shape{1, 1, sizeof(uint64_t)};
    if (cpu::Executor* executor = runtime.cpu_executor()) {
        executor->run(shape, [&](cpu::Warp& warp) { ll_mask_clean(Ctx(warp), args); });
        return;
    }
#if defined(CROSSDOCK_WITH_CUDA)
    shape.warps_per_block = 8;
    cuda::nodes::launch_ll_mask_clean(args, shape, stream);
#endif
}

}  // namespace crossdock::nodes
