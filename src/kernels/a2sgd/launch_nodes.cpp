// SPDX-License-Identifier: Apache-2.0
// The kernels that reach other ranks once more, for several load/store domains (CROSSDOCK_GIN_PEERS is defined
// for this file).
#include "kernels/a2sgd/launch.h"
#include "kernels/a2sgd/means.h"
#include "kernels/a2sgd/sums.h"
#include "runtime/cpu/executor.h"

namespace crossdock::nodes {

static_assert(kHasGinPeers, "this file is compiled with CROSSDOCK_GIN_PEERS");

void launch_a2sgd_sums(Runtime& runtime, const A2sgdArgs& args, LaunchShape shape,
                       [[maybe_unused]] cudaStream_t stream) {
    if (cpu::Executor* executor = runtime.cpu_executor()) {
        executor->run(shape, [&](cpu::Warp& warp) {
            args.sums_in_fp64 ? a2sgd_sums<double>(Ctx(warp), args) : a2sgd_sums<float>(Ctx(warp), args);
        });
        return;
    }
#if defined(CROSSDOCK_WITH_CUDA)
    cuda::nodes::launch_a2sgd_sums(args, shape, stream);
#endif
}

void launch_a2sgd_means(Runtime& runtime, const A2sgdArgs& args, LaunchShape shape,
                        [[maybe_unused]] cudaStream_t stream) {
    if (cpu::Executor* executor = runtime.cpu_executor()) {
        executor->run(shape, [&](cpu::Warp& warp) { a2sgd_means(Ctx(warp), args); });
        return;
    }
#if defined(CROSSDOCK_WITH_CUDA)
    cuda::nodes::launch_a2sgd_means(args, shape, stream);
#endif
}

}  // namespace crossdock::nodes
