// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "core/process.h"
#include "kernels/routing/count.h"
#include "kernels/routing/launch.h"
#include "kernels/routing/pack.h"
#include "kernels/routing/unpack.h"
#include "runtime/cpu/launch.h"
#include "runtime/cpu/local_executor.h"

namespace crossdock {
namespace {

// GPUs: one warp per row; many rows fill a whole device.
constexpr uint32_t kWarps = 8;
LaunchShape shape_of_rows(int device, uint64_t num_rows, size_t shared_bytes) {
    if (device < 0) return {1, 1, shared_bytes};
    constexpr uint64_t kMostBlocks = 512;
    const uint64_t blocks = std::clamp<uint64_t>((num_rows + kWarps - 1) / kWarps, 1, kMostBlocks);
    return {static_cast<int>(blocks), static_cast<int>(kWarps), shared_bytes};
}

}  // namespace

static void run_on_cpu(CountRouting, cpu::Executor& executor, const crossdockRoutingCounts_t& args,
                       const LaunchShape& shape) {
    executor.run(shape, [&](cpu::Warp& warp) { count_routing(Ctx(warp), args); });
}

static void run_on_cpu(PackRouting, cpu::Executor& executor, const crossdockRoutingSent_t& args,
                       const LaunchShape& shape) {
    executor.run(shape, [&](cpu::Warp& warp) { pack_routing(Ctx(warp), args); });
}

static void run_on_cpu(UnpackRouting, cpu::Executor& executor, const crossdockRoutingReceived_t& args,
                       const LaunchShape& shape) {
    executor.run(shape, [&](cpu::Warp& warp) { unpack_routing(Ctx(warp), args); });
}

template struct OnCpu<CountRouting, kPeers>;
template struct OnCpu<PackRouting, kPeers>;
template struct OnCpu<UnpackRouting, kPeers>;

LaunchShape CountRouting::shape(const Args& counts) {
    if (counts.device < 0) return {1, 1, sizeof(int) * num_counters(routing_slice(counts, 0, 1))};
    constexpr int kMostWarps = 16;
    // One rank, its experts, and a node where one begins.
    return {static_cast<int>(counts.num_ranks),
            static_cast<int>(std::clamp<uint64_t>((counts.num_tokens + 31) / 32, 1, kMostWarps)),
            sizeof(int) * (counts.num_experts / counts.num_ranks + 2)};
}

LaunchShape PackRouting::shape(const Args& routing) { return shape_of_rows(routing.device, routing.num_tokens, 0); }

LaunchShape UnpackRouting::shape(const Args& routing) {
    return shape_of_rows(routing.device, routing.num_rows, sizeof(int) * shared_words(routing));
}

cpu::Executor& executor_of_calling_thread() {
    static cpu::LocalExecutor executor(1);  // static, because it asks the system for the number of cores
    return executor;
}
static const MadeAtLoad executor_made_at_load(executor_of_calling_thread);

}  // namespace crossdock
