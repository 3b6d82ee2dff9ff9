// SPDX-License-Identifier: Apache-2.0
#include "core/ll_plan.h"

#include <algorithm>

#include "core/error.h"
#include "kernels/ll/combine_send.h"
#include "kernels/ll/dispatch_send.h"
#include "runtime/runtime.h"

namespace crossdock {
namespace {

constexpr uint32_t kGpuWarps = 16;
constexpr uint32_t kGpuSendWarps = 8;
constexpr uint32_t kGpuReceiveWarps = 8;
constexpr uint32_t kGpuSendStages = 4;     // tokens of a block under way at once
constexpr uint32_t kGpuCombineStages = 8;  // rows of a block under way at once
constexpr uint32_t kGpuChunkBytes = 32768;  // long enough for full NVLink speed, short enough for several stages a block
constexpr uint32_t kGpuSegmentBytes = 1024;
constexpr uint32_t kFewestGpuBlocks = 48;   // rows of other ranks arrive however few tokens this rank has
constexpr uint32_t kRacyBlocks = 2;  // the deterministic world: several blocks and warps, for their interleavings
constexpr uint32_t kRacyWarps = 3;
constexpr uint64_t kCpuCacheBytes = uint64_t{32} << 20;  // of a host, roughly: the last level of today's servers

// How a world's blocks are manned.
struct Crew {
    uint32_t warps;
    uint32_t send_warps;
    uint32_t receive_warps;
    uint32_t most_stages;
    uint32_t tagged_tokens;
};

Crew crew_of(World world, uint32_t gpu_stages) {
    switch (world) {
        case World::kThreads:
        case World::kProcesses:
            return {1, 1, 1, 1, 0};  // one thread runs it all: fibers would only add switches, and tags bytes
        case World::kDeterministic:
            return {kRacyWarps, 2, 2, 2, kMaxTaggedTokens / 2};  // one warp does both
        case World::kCuda:
            break;
    }
    return {kGpuWarps, kGpuSendWarps, kGpuReceiveWarps, gpu_stages, kMaxTaggedTokens};
}

uint32_t blocks_for(const Group& group, uint32_t most_sms, uint32_t work) {
    switch (group.communicator().world()) {
        case World::kThreads:
        case World::kProcesses:
            return 1;
        case World::kDeterministic:
            return kRacyBlocks;
        case World::kCuda:
            break;
    }
    // Ranks that share a device must all be resident at once, since their kernels wait for each other.
    const uint32_t resident = std::max(1u, most_sms / static_cast<uint32_t>(group.communicator().ranks_on_device()));
    return std::min(resident, std::max(kFewestGpuBlocks, work));
}

uint32_t chunk_for(const Group& group, uint32_t row_bytes) {
    return group.communicator().world() == World::kCuda ? std::min(row_bytes, kGpuChunkBytes) : row_bytes;
}

void man(const Crew& crew, LlCommon& common) {
    common.warps_per_block = crew.warps;
    common.send_warps = crew.send_warps;
    common.receive_warps = crew.receive_warps;
    common.tagged_tokens = std::min(crew.tagged_tokens, common.arena.tagged_tokens());
}

template <typename Shared, typename Args>
bool fits(const Group& group, const Args& args) {
    return Shared::of(args).bytes <= group.runtime().max_shared_bytes();
}

template <typename Shared, typename Args>
LaunchShape shape_of(const Group& group, const Args& args, uint32_t blocks, const char* what) {
    require(fits<Shared>(group, args), ncclInvalidArgument,
            "{}: a block needs {} bytes of shared memory for one row's scales and {} experts, the device has {}", what,
            Shared::of(args).bytes, args.common.arena.num_experts, group.runtime().max_shared_bytes());
    // What the host's ranks move together, if all have as many tokens.
    const uint64_t moved =
        uint64_t{args.common.num_tokens} * args.common.topk * args.row_bytes * group.config().num_ranks;
    // Not where ranks share a device: one's next kernel could take the place that another's waits for.
    const bool is_alone = group.communicator().ranks_on_device() == 1;
    return {static_cast<int>(blocks), static_cast<int>(args.common.warps_per_block), Shared::of(args).bytes, is_alone,
            moved > kCpuCacheBytes};
}

}  // namespace

LaunchShape plan_ll_dispatch(const Group& group, LlDispatchArgs& args) {
    LlCommon& common = args.common;
    const Crew crew = crew_of(group.communicator().world(), kGpuSendStages);
    man(crew, common);
    common.chunk_bytes = chunk_for(group, args.row_bytes);
    const uint32_t blocks = blocks_for(group, group.config().dispatch_sms, common.num_tokens + 1);
    const uint32_t senders = std::max(1u, blocks - 1);
    common.num_stages = std::clamp((common.num_tokens + senders - 1) / senders, 1u, crew.most_stages);
    args.receive_stages = crew.receive_warps;
    while (!fits<LlDispatchShared>(group, args) && args.receive_stages > 1) {
        --(args.receive_stages > common.num_stages ? args.receive_stages : common.num_stages);
    }
    return shape_of<LlDispatchShared>(group, args, blocks, "dispatch");
}

LaunchShape plan_ll_combine(const Group& group, LlCombineArgs& args) {
    LlCommon& common = args.common;
    const Crew crew = crew_of(group.communicator().world(), kGpuCombineStages);
    man(crew, common);
    const bool in_one_piece = args.wire == LlCombineWire::kNvfp4;  // a row's block scales follow its payload
    common.chunk_bytes = in_one_piece ? args.wire_bytes : chunk_for(group, args.wire_bytes);
    const bool is_gpu = group.communicator().world() == World::kCuda;
    args.segment_bytes = is_gpu ? kGpuSegmentBytes : std::max(args.row_bytes, 16u);
    const uint32_t blocks = blocks_for(group, group.config().combine_sms, common.num_tokens);
    common.num_stages = crew.most_stages;
    while (!fits<LlCombineShared>(group, args) && common.num_stages > 1) --common.num_stages;
    return shape_of<LlCombineShared>(group, args, blocks, "combine");
}

}  // namespace crossdock
