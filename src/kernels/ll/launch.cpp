// SPDX-License-Identifier: Apache-2.0
#include "kernels/ll/launch.h"

#include "kernels/ll/combine_on_cpu.h"
#include "kernels/ll/dispatch.h"
#include "kernels/ll/variants.h"
#include "runtime/cpu/executor.h"

namespace crossdock {
void launch_ll_dispatch(Runtime& runtime, const LlDispatchArgs& args, LaunchShape shape,
                        [[maybe_unused]] cudaStream_t stream) {
    if (args.common.reach.has_several_domains()) return nodes::launch_ll_dispatch(runtime, args, shape, stream);
    if (cpu::Executor* executor = runtime.cpu_executor()) {
        with_dispatch_variant(args, [&](const auto& known) {
            executor->run(shape, [&](cpu::Warp& warp) { ll_dispatch(Ctx(warp), known); });
        });
        return;
    }
#if defined(CROSSDOCK_WITH_CUDA)
    cuda::launch_ll_dispatch(args, shape, stream);
#endif
}

void launch_ll_combine(Runtime& runtime, const LlCombineArgs& args, LaunchShape shape,
                       [[maybe_unused]] cudaStream_t stream) {
    if (args.common.reach.has_several_domains()) return nodes::launch_ll_combine(runtime, args, shape, stream);
    if (cpu::Executor* executor = runtime.cpu_executor()) {
        with_combine_variant(args, [&](const auto& known) {
            executor->run(shape, [&](cpu::Warp& warp) { run_ll_combine(Ctx(warp), known); });
        });
        return;
    }
#if defined(CROSSDOCK_WITH_CUDA)
    cuda::launch_ll_combine(args, shape, stream);
#endif
}

void launch_ll_mask_clean(Runtime& runtime, const LlMaskCleanArgs& args, [[maybe_unused]] cudaStream_t stream) {
    if (args.exchange.reach.has_several_domains()) return nodes::launch_ll_mask_clean(runtime, args, stream);
    LaunchShape shape{1, 1, sizeof(uint64_t)};
    if (cpu::Executor* executor = runtime.cpu_executor()) {
        executor->run(shape, [&](cpu::Warp& warp) { ll_mask_clean(Ctx(warp), args); });
        return;
    }
#if defined(CROSSDOCK_WITH_CUDA)
    shape.warps_per_block = 8;
    cuda::launch_ll_mask_clean(args, shape, stream);
#endif
}

void launch_ll_sources(Runtime& runtime, const LlSourcesArgs& args, [[maybe_unused]] cudaStream_t stream) {
    LaunchShape shape{1, 1, 0};
    if (cpu::Executor* executor = runtime.cpu_executor()) {
        executor->run(shape, [&](cpu::Warp& warp) { ll_sources(Ctx(warp), args); });
        return;
    }
#if defined(CROSSDOCK_WITH_CUDA)
    shape.warps_per_block = 16;
    cuda::launch_ll_sources(args, shape, stream);
#endif
}

}  // namespace crossdock
