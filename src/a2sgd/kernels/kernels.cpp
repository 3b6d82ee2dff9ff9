// SPDX-License-Identifier: Apache-2.0
// The kernels of A2SGD on CPUs. Compiled twice (platform.h: Peers).
#include "a2sgd/kernels/apply.h"
#include "a2sgd/kernels/launch.h"
#include "a2sgd/kernels/means.h"
#include "a2sgd/kernels/sums.h"
#include "runtime/cpu/launch.h"

namespace crossdock {

static void run_on_cpu(A2sgdSumsKernel, cpu::Executor& executor, const A2sgdArgs& args, const LaunchShape& shape) {
    executor.run(shape, [&](cpu::Warp& warp) {
        args.sums_in_fp64 ? a2sgd_sums<double>(Ctx(warp), args) : a2sgd_sums<float>(Ctx(warp), args);
    });
}

static void run_on_cpu(A2sgdMeansKernel, cpu::Executor& executor, const A2sgdArgs& args, const LaunchShape& shape) {
    executor.run(shape, [&](cpu::Warp& warp) { a2sgd_means(Ctx(warp), args); });
}

template struct OnCpu<A2sgdSumsKernel, kPeers>;
template struct OnCpu<A2sgdMeansKernel, kPeers>;

#if !defined(CROSSDOCK_GIN_PEERS)  // compiled once
static void run_on_cpu(A2sgdApplyKernel, cpu::Executor& executor, const A2sgdArgs& args, const LaunchShape& shape) {
    executor.run(shape, [&](cpu::Warp& warp) { a2sgd_apply(Ctx(warp), args); });
}
template struct OnCpu<A2sgdApplyKernel, kPeers>;
#endif

}  // namespace crossdock
