// SPDX-License-Identifier: Apache-2.0
#include "kernels/labels/launch.h"

#include <algorithm>

#include "kernels/labels/count.h"
#include "kernels/labels/expand.h"
#include "kernels/labels/pack.h"
#include "kernels/labels/place.h"
#include "kernels/labels/reduce.h"
#include "kernels/labels/unpack.h"
#include "runtime/cpu/local_executor.h"

#if defined(CROSSDOCK_WITH_CUDA)
#include "runtime/cuda/cuda_check.h"
#endif

namespace crossdock {
namespace {

template <typename Kernel>
void run_here(const LaunchShape& shape, Kernel&& kernel) {
    static cpu::LocalExecutor executor(1);  // the system is asked for its number of cores
    executor.run(shape, [&](cpu::Warp& warp) { kernel(Ctx(warp)); });
}

// GPUs: a warp takes a row, and blocks enough for a whole device many.
constexpr uint32_t kWarps = 8;
[[maybe_unused]] LaunchShape shape_of_rows(uint64_t num_rows, size_t shared_bytes) {
    constexpr uint64_t kMostBlocks = 512;
    const uint64_t blocks = std::clamp<uint64_t>((num_rows + kWarps - 1) / kWarps, 1, kMostBlocks);
    return {static_cast<int>(blocks), static_cast<int>(kWarps), shared_bytes};
}

}  // namespace

void launch_count_routing(const crossdockRoutingCounts_t& counts, [[maybe_unused]] cudaStream_t stream) {
    LaunchShape shape{1, 1, sizeof(int) * num_counters(routing_slice(counts, 0, 1))};
    if (counts.device < 0) return run_here(shape, [&](const Ctx& ctx) { count_routing(ctx, counts); });
#if defined(CROSSDOCK_WITH_CUDA)
    constexpr int kMostWarps = 16;
    shape.num_blocks = static_cast<int>(counts.num_ranks);
    shape.warps_per_block = static_cast<int>(std::clamp<uint64_t>((counts.num_tokens + 31) / 32, 1, kMostWarps));
    // One rank, its experts, and a node where one begins.
    shape.shared_bytes = sizeof(int) * (counts.num_experts / counts.num_ranks + 2);
    const DeviceGuard guard(counts.device);
    cuda::launch_count_routing(counts, shape, stream);
#endif
}

void launch_pack_labels(const crossdockLabelsSent_t& labels, [[maybe_unused]] cudaStream_t stream) {
    if (labels.device < 0) return run_here({}, [&](const Ctx& ctx) { pack_labels(ctx, labels); });
#if defined(CROSSDOCK_WITH_CUDA)
    const DeviceGuard guard(labels.device);
    cuda::launch_pack_labels(labels, shape_of_rows(labels.num_tokens, 0), stream);
#endif
}

void launch_unpack_labels(const crossdockLabelsReceived_t& labels, [[maybe_unused]] cudaStream_t stream) {
    const size_t shared_bytes = sizeof(int) * shared_words(labels);
    if (labels.device < 0) {
        return run_here({1, 1, shared_bytes}, [&](const Ctx& ctx) { unpack_labels(ctx, labels); });
    }
#if defined(CROSSDOCK_WITH_CUDA)
    const DeviceGuard guard(labels.device);
    cuda::launch_unpack_labels(labels, shape_of_rows(labels.num_rows, shared_bytes), stream);
#endif
}

void launch_place_rows(const crossdockRowPlaces_t& places, [[maybe_unused]] cudaStream_t stream) {
    LaunchShape shape{1, 1, sizeof(int) * shared_words(placing_slice(places, 0, 1), 1)};
    if (places.device < 0) return run_here(shape, [&](const Ctx& ctx) { place_rows(ctx, places); });
#if defined(CROSSDOCK_WITH_CUDA)
    constexpr uint64_t kMostWarps = 32;
    const uint64_t pairs = places.num_rows * places.num_topk;
    const uint64_t warps = std::clamp<uint64_t>((pairs + 127) / 128, 1, kMostWarps);  // a step each, at least
    shape.num_blocks = static_cast<int>(places.num_experts);
    shape.warps_per_block = static_cast<int>(warps);
    shape.shared_bytes = sizeof(int) * shared_words(PlacingSlice{0, 1}, static_cast<uint32_t>(warps));
    const DeviceGuard guard(places.device);
    cuda::launch_place_rows(places, shape, stream);
#endif
}

void launch_expand_rows(const crossdockExpandedRows_t& rows, [[maybe_unused]] cudaStream_t stream) {
    if (rows.device < 0) {
        return run_here({1, 1, sizeof(int) * shared_words(rows, 1)}, [&](const Ctx& ctx) { expand_rows(ctx, rows); });
    }
#if defined(CROSSDOCK_WITH_CUDA)
    const uint64_t num_rows = std::max(rows.num_rows, rows.zeros_in_gaps != 0 ? rows.num_expanded : 0);
    const DeviceGuard guard(rows.device);
    cuda::launch_expand_rows(rows, shape_of_rows(num_rows, sizeof(int) * shared_words(rows, 32 * kWarps)), stream);
#endif
}

void launch_reduce_rows(const crossdockReducedRows_t& rows, [[maybe_unused]] cudaStream_t stream) {
    if (rows.device < 0) return run_here({}, [&](const Ctx& ctx) { reduce_rows(ctx, rows); });
#if defined(CROSSDOCK_WITH_CUDA)
    const DeviceGuard guard(rows.device);
    cuda::launch_reduce_rows(rows, shape_of_rows(rows.num_rows, 0), stream);
#endif
}

}  // namespace crossdock
