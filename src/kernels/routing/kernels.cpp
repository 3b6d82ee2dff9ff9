// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "core/process.h"
#include "kernels/routing/count.h"
#include "kernels/routing/launch.h"
#include "runtime/cpu/launch.h"
#include "runtime/cpu/local_executor.h"

namespace crossdock {
static void run_on_cpu(CountRouting, cpu::Executor& executor, const crossdockRoutingCounts_t& args,
                       const LaunchShape& shape) {
    executor.run(shape, [&](cpu::Warp& warp) { count_routing(Ctx(warp), args); });
}

template struct OnCpu<CountRouting, kPeers>;

LaunchShape CountRouting::shape(const Args& counts) {
    if (counts.device < 0) return {1, 1, sizeof(int) * num_counters(routing_slice(counts, 0, 1))};
    constexpr int kMostWarps = 16;
    // One rank, its experts, and a node where one begins.
    return {static_cast<int>(counts.num_ranks),
            static_cast<int>(std::clamp<uint64_t>((counts.num_tokens + 31) / 32, 1, kMostWarps)),
            sizeof(int) * (counts.num_experts / counts.num_ranks + 2)};
}

cpu::Executor& executor_of_calling_thread() {
    static cpu::LocalExecutor executor(1);  // static, because it asks the system for the number of cores
    return executor;
}
static const MadeAtLoad executor_made_at_load(executor_of_calling_thread);

}  // namespace crossdock
