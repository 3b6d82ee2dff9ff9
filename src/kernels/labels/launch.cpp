// SPDX-License-Identifier: Apache-2.0
#include "kernels/labels/launch.h"

#include <algorithm>

#include "kernels/labels/count.h"
#include "kernels/labels/pack.h"
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
[[maybe_unused]] LaunchShape shape_of_rows(uint64_t num_rows, size_t shared_bytes) {
    constexpr uint64_t kWarps = 8;
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

}  // namespace crossdock
