// SPDX-License-Identifier: Apache-2.0
#include "kernels/a2sgd/launch.h"

#include "kernels/a2sgd/apply.h"
#include "kernels/a2sgd/means.h"
#include "kernels/a2sgd/sums.h"
#include "runtime/cpu/executor.h"

namespace crossdock {

void launch_a2sgd_sums(Runtime& runtime, const A2sgdArgs& args, LaunchShape shape,
                       [[maybe_unused]] cudaStream_t stream) {
    if (args.reach.has_several_domains()) return nodes::launch_a2sgd_sums(runtime, args, shape, stream);
    if (cpu::Executor* executor = runtime.cpu_executor()) {
        executor->run(shape, [&](cpu::Warp& warp) {
            args.sums_in_fp64 ? a2sgd_sums<double>(Ctx(warp), args) : a2sgd_sums<float>(Ctx(warp), args);
        });
        return;
    }
#if defined(CROSSDOCK_WITH_CUDA)
    cuda::launch_a2sgd_sums(args, shape, stream);
#endif
}

void launch_a2sgd_means(Runtime& runtime, const A2sgdArgs& args, LaunchShape shape,
                        [[maybe_unused]] cudaStream_t stream) {
    if (args.reach.has_several_domains()) return nodes::launch_a2sgd_means(runtime, args, shape, stream);
    if (cpu::Executor* executor = runtime.cpu_executor()) {
        executor->run(shape, [&](cpu::Warp& warp) { a2sgd_means(Ctx(warp), args); });
        return;
    }
#if defined(CROSSDOCK_WITH_CUDA)
    cuda::launch_a2sgd_means(args, shape, stream);
#endif
}

void launch_a2sgd_apply(Runtime& runtime, const A2sgdArgs& args, LaunchShape shape,
                        [[maybe_unused]] cudaStream_t stream) {
    if (cpu::Executor* executor = runtime.cpu_executor()) {
        executor->run(shape, [&](cpu::Warp& warp) { a2sgd_apply(Ctx(warp), args); });
        return;
    }
#if defined(CROSSDOCK_WITH_CUDA)
    cuda::launch_a2sgd_apply(args, shape, stream);
#endif
}

}  // namespace crossdock
