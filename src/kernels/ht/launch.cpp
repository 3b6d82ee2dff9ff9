// SPDX-License-Identifier: Apache-2.0
#include "kernels/ht/launch.h"

#include "kernels/ht/combine_on_cpu.h"
#include "kernels/ht/dispatch.h"
#include "kernels/ht/update.h"
#include "runtime/cpu/executor.h"

namespace crossdock {
void launch_ht_update(Runtime& runtime, const HtUpdateArgs& args, LaunchShape shape,
                      [[maybe_unused]] cudaStream_t stream) {
    if (args.common.reach.has_several_domains()) return nodes::launch_ht_update(runtime, args, shape, stream);
    if (cpu::Executor* executor = runtime.cpu_executor()) {
        executor->run(shape, [&](cpu::Warp& warp) { ht_update(Ctx(warp), args); });
        return;
    }
#if defined(CROSSDOCK_WITH_CUDA)
    cuda::launch_ht_update(args, shape, stream);
#endif
}

void launch_ht_dispatch(Runtime& runtime, const HtDispatchArgs& args, LaunchShape shape,
                        [[maybe_unused]] cudaStream_t stream) {
    if (args.common.reach.has_several_domains()) return nodes::launch_ht_dispatch(runtime, args, shape, stream);
    if (cpu::Executor* executor = runtime.cpu_executor()) {
        executor->run(shape, [&](cpu::Warp& warp) { ht_dispatch(Ctx(warp), args); });
        return;
    }
#if defined(CROSSDOCK_WITH_CUDA)
    cuda::launch_ht_dispatch(args, shape, stream);
#endif
}

void launch_ht_combine(Runtime& runtime, const HtCombineArgs& args, LaunchShape shape,
                       [[maybe_unused]] cudaStream_t stream) {
    if (args.common.reach.has_several_domains()) return nodes::launch_ht_combine(runtime, args, shape, stream);
    if (cpu::Executor* executor = runtime.cpu_executor()) {
        executor->run(shape, [&](cpu::Warp& warp) { run_ht_combine(Ctx(warp), args); });
        return;
    }
#if defined(CROSSDOCK_WITH_CUDA)
    cuda::launch_ht_combine(args, shape, stream);
#endif
}

void launch_ht_mask_clean(Runtime& runtime, const HtMaskCleanArgs& args, [[maybe_unused]] cudaStream_t stream) {
    LaunchShape shape{1, 1, sizeof(uint64_t)};
    if (cpu::Executor* executor = runtime.cpu_executor()) {
        executor->run(shape, [&](cpu::Warp& warp) { ht_mask_clean(Ctx(warp), args); });
        return;
    }
#if defined(CROSSDOCK_WITH_CUDA)
    shape.warps_per_block = 8;
    cuda::launch_ht_mask_clean(args, shape, stream);
#endif
}

}  // namespace crossdock
