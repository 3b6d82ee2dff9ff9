// SPDX-License-Identifier: Apache-2.0
#include "core/ll_plan.h"

#include <algorithm>

#include "core/error.h"
#include "kernels/ll/combine_send.h"
#include "kernels/ll/dispatch_send.h"
#include "runtime/runtime.h"

namespace crossdock {
namespace {

constexpr uint32_t kMostWarps = 8;
constexpr uint32_t kGpuChunkBytes = 16384;  // long enough for full NVLink speed, short enough for eight stages a block
constexpr uint32_t kFewestGpuBlocks = 16;   // rows of other ranks arrive however few tokens this rank has
constexpr uint32_t kGpuSegmentBytes = 2048;
constexpr uint32_t kRacyBlocks = 2;  // the deterministic world: several blocks and warps, for their interleavings
constexpr uint32_t kRacyWarps = 2;
constexpr uint64_t kCpuCacheBytes = uint64_t{32} << 20;  // of a host, roughly: the last level of today's servers

struct Grid {
    uint32_t blocks;
    uint32_t warps;
};

Grid grid_for(const Group& group, uint32_t most_sms, uint32_t work) {
    switch (group.communicator().world()) {
        case World::kThreads:
        case World::kProcesses:
            return {1, 1};  // one thread runs it all: fibers would only add switches
        case World::kDeterministic:
            return {kRacyBlocks, kRacyWarps};
        case World::kCuda:
            break;
    }
    // Ranks that share a device must all be resident at once, since their kernels wait for each other.
    const uint32_t resident = std::max(1u, most_sms / static_cast<uint32_t>(group.communicator().ranks_on_device()));
    return {std::min(resident, std::max(kFewestGpuBlocks, work)), kMostWarps};
}

uint32_t chunk_for(const Group& group, uint32_t row_bytes) {
    return group.communicator().world() == World::kCuda ? std::min(row_bytes, kGpuChunkBytes) : row_bytes;
}

// As many warps as have room for their stages.
template <typename Shared, typename Args>
LaunchShape fit(const Group& group, Args& args, const Grid& grid, const char* what) {
    const size_t room = group.runtime().max_shared_bytes();
    for (args.common.warps_per_block = grid.warps; args.common.warps_per_block > 0; --args.common.warps_per_block) {
        const size_t bytes = Shared::of(args).bytes;
        if (bytes > room) continue;
        // What the host's ranks move together, if all have as many tokens.
        const uint64_t moved =
            uint64_t{args.common.num_tokens} * args.common.topk * args.row_bytes * group.config().num_ranks;
        return {static_cast<int>(grid.blocks), static_cast<int>(args.common.warps_per_block), bytes,
                moved > kCpuCacheBytes};
    }
    args.common.warps_per_block = 1;
    fail(ncclInvalidArgument,
         "{}: a block needs {} bytes of shared memory for one row's scales and {} experts, the device has {}", what,
         Shared::of(args).bytes, args.common.arena.num_experts, room);
}

}  // namespace

LaunchShape plan_ll_dispatch(const Group& group, LlDispatchArgs& args) {
    args.common.chunk_bytes = chunk_for(group, args.row_bytes);
    return fit<LlDispatchShared>(group, args, grid_for(group, group.config().dispatch_sms, args.common.num_tokens + 1),
                                 "dispatch");
}

LaunchShape plan_ll_combine(const Group& group, LlCombineArgs& args) {
    const bool in_one_piece = args.wire == LlCombineWire::kNvfp4;  // a row's block scales follow its payload
    args.common.chunk_bytes = in_one_piece ? args.wire_bytes : chunk_for(group, args.wire_bytes);
    const uint32_t elements = args.row_bytes / dtype_bytes(args.dtype);
    const bool is_gpu = group.communicator().world() == World::kCuda;
    args.segment_elements = is_gpu ? kGpuSegmentBytes / dtype_bytes(args.dtype) : std::max(elements, 1u);
    const uint32_t segments = (elements + args.segment_elements - 1) / args.segment_elements;
    const uint32_t work =
        std::max(args.common.num_tokens, (args.common.num_tokens * segments + kMostWarps - 1) / kMostWarps);
    return fit<LlCombineShared>(group, args, grid_for(group, group.config().combine_sms, work), "combine");
}

}  // namespace crossdock
