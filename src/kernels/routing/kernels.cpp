// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "core/process.h"
#include "kernels/routing/count.h"
#include "kernels/routing/expand.h"
#include "kernels/routing/launch.h"
#include "kernels/routing/pack.h"
#include "kernels/routing/place.h"
#include "kernels/routing/reduce.h"
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

static void run_on_cpu(PlaceRows, cpu::Executor& executor, const crossdockRowPlaces_t& args, const LaunchShape& shape) {
    executor.run(shape, [&](cpu::Warp& warp) { place_rows(Ctx(warp), args); });
}

static void run_on_cpu(ExpandRows, cpu::Executor& executor, const crossdockExpandedRows_t& args,
                       const LaunchShape& shape) {
    executor.run(shape, [&](cpu::Warp& warp) { expand_rows(Ctx(warp), args); });
}

static void run_on_cpu(ReduceRows, cpu::Executor& executor, const crossdockReducedRows_t& args,
                       const LaunchShape& shape) {
    executor.run(shape, [&](cpu::Warp& warp) { reduce_rows(Ctx(warp), args); });
}

template struct OnCpu<CountRouting, kPeers>;
template struct OnCpu<PackRouting, kPeers>;
template struct OnCpu<UnpackRouting, kPeers>;
template struct OnCpu<PlaceRows, kPeers>;
template struct OnCpu<ExpandRows, kPeers>;
template struct OnCpu<ReduceRows, kPeers>;

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

LaunchShape PlaceRows::shape(const Args& places) {
    if (places.device < 0) return {1, 1, sizeof(int) * shared_words(placing_slice(places, 0, 1), 1)};
    constexpr uint64_t kMostWarps = 32;
    const uint64_t pairs = places.num_rows * places.num_topk;
    const uint64_t warps = std::clamp<uint64_t>((pairs + 127) / 128, 1, kMostWarps);  // a step each, at least
    return {static_cast<int>(places.num_experts), static_cast<int>(warps),
            sizeof(int) * shared_words(PlacingSlice{0, 1}, static_cast<uint32_t>(warps))};
}

LaunchShape ExpandRows::shape(const Args& rows) {
    const uint64_t num_rows = std::max(rows.num_rows, rows.zeros_in_gaps != 0 ? rows.num_expanded : 0);
    const uint32_t threads = rows.device < 0 ? 1 : 32 * kWarps;
    return shape_of_rows(rows.device, num_rows, sizeof(int) * shared_words(rows, threads));
}

LaunchShape ReduceRows::shape(const Args& rows) { return shape_of_rows(rows.device, rows.num_rows, 0); }

cpu::Executor& executor_of_calling_thread() {
    static cpu::LocalExecutor executor(1);  // static, because it asks the system for the number of cores
    return executor;
}
static const MadeAtLoad executor_made_at_load(executor_of_calling_thread);

}  // namespace crossdock
