// SPDX-License-Identifier: Apache-2.0
// The high-throughput kernels once more, for groups of several load/store domains (CROSSDOCK_GIN_PEERS is defined
// for this file).
#include "kernels/ht/combine_on_cpu.h"
#include "kernels/ht/dispatch.h"
#include "kernels/ht/launch.h"
#include "kernels/ht/update.h"
#include "runtime/cpu/executor.h"

namespace crossdock::nodes {

static_assert(kHasGinPeers, "this file is compiled with CROSSDOCK_GIN_PEERS");

void launch_ht_update(Runtime& runtime, const HtUpdateArgs& args, LaunchShape shape,
                      [[maybe_unused]] cudaStream_t stream) {
    if (cpu::Executor* executor = runtime.cpu_executor()) {
        executor->run(shape, [&](cpu::Warp& warp) { ht_update(Ctx(warp), args); });
        return;
    }
#if defined(CROSSDOCK_WITH_CUDA)
    cuda::nodes::launch_ht_update(args, shape, stream);
#endif
}

void launch_ht_dispatch(Runtime& runtime, const HtDispatchArgs& args, LaunchShape shape,
                        [[maybe_unused]] cudaStream_t stream) {
    if (cpu::Executor* executor = runtime.cpu_executor()) {
        executor->run(shape, [&](cpu::Warp& warp) { ht_dispatch(Ctx(warp), args); });
        return;
    }
#if defined(CROSSDOCK_WITH_CUDA)
    cuda::nodes::launch_ht_dispatch(args, shape, stream);
#endif
}

void launch_ht_combine(Runtime& runtime, const HtCombineArgs& args, LaunchShape shape,
                       [[maybe_unused]] cudaStream_t stream) {
    if (cpu::Executor* executor = runtime.cpu_executor()) {
        executor->run(shape, [&](cpu::Warp& warp) { run_ht_combine(Ctx(warp), args); });
        return;
    }
#if defined(CROSSDOCK_WITH_CUDA)
    cuda::nodes::launch_ht_combine(args, shape, stream);
#endif
}

}  // namespace crossdock::nodes
