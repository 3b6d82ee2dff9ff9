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
constexpr uint32_t kGpuChunkBytes =
    32768;  // long enough for full NVLink speed, short enough for several stages a block
constexpr uint32_t kGpuSegmentBytes = 1024;
constexpr uint32_t kLog2BlocksOfTaggedToken = 2;  // what one multiprocessor stores a microsecond is little
constexpr uint32_t kFewestGpuBlocks = 64;         // rows of other ranks arrive however few tokens this rank has
constexpr uint32_t kRacyBlocks = 2;  // the deterministic world: several blocks and warps, for their interleavings
constexpr uint32_t kRacyWarps = 3;
constexpr uint64_t kCpuCacheBytes = uint64_t{32} << 20;  // of a host, roughly: the last level of today's servers

struct Staffing {
    LlCrew crew;  // with the most stages
    uint32_t tagged_tokens;
};

Staffing staffing_for(World world, uint32_t gpu_stages, uint32_t row_bytes) {
    switch (world) {
        case World::kThreads:
        case World::kProcesses:
            return {{1, 1, 1, 1, 1, row_bytes}, 0};  // one thread runs it all: fibers only add switches, and tags bytes
        case World::kDeterministic:
            return {{kRacyWarps, 2, 2, 2, 2, row_bytes}, kMaxTaggedTokens / 2};  // one warp both sends and receives
        case World::kCuda:
            break;
    }
    return {
        {kGpuWarps, kGpuSendWarps, kGpuReceiveWarps, gpu_stages, kGpuReceiveWarps, std::min(row_bytes, kGpuChunkBytes)},
        kMaxTaggedTokens};
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

LaunchShape shape_of(const Group& group, const LlCommon& common, uint32_t row_bytes, uint32_t shared_bytes,
                     uint32_t blocks, const char* what) {
    require(shared_bytes <= group.runtime().max_shared_bytes(), ncclInvalidArgument,
            "{}: a block needs {} bytes of shared memory for one row's scales and {} experts, the device has {}", what,
            shared_bytes, common.arena.num_experts, group.runtime().max_shared_bytes());
    // What the host's ranks move together, if all have as many tokens.
    const uint64_t moved = uint64_t{common.num_tokens} * common.topk * row_bytes * group.config().num_ranks;
    // Not where ranks share a device: one's next kernel could take the place that another's waits for.
    const bool is_alone = group.communicator().ranks_on_device() == 1;
    return {static_cast<int>(blocks), static_cast<int>(common.crew.warps_per_block), shared_bytes, is_alone,
            moved > kCpuCacheBytes};
}

}  // namespace

LaunchShape plan_ll_dispatch(const Group& group, LlDispatchArgs& args) {
    LlCommon& common = args.common;
    LlCrew& crew = common.crew;
    const Staffing staffing = staffing_for(group.communicator().world(), kGpuSendStages, args.row_bytes);
    crew = staffing.crew;
    common.tagged_tokens = std::min(staffing.tagged_tokens, common.arena.tagged_tokens());
    const uint32_t blocks = blocks_for(group, group.config().dispatch_sms, common.num_tokens + 1);
    const uint32_t senders = std::max(1u, blocks - 1);
    common.tokens_per_block = (common.num_tokens + senders - 1) / senders;
    while (common.num_tokens > 0 && common.num_tokens <= common.tagged_tokens &&
           common.log2_blocks_per_token < kLog2BlocksOfTaggedToken &&
           common.num_tokens << (common.log2_blocks_per_token + 1) <= senders)
        ++common.log2_blocks_per_token;
    crew.num_stages = std::clamp(common.tokens_per_block, 1u, crew.num_stages);
    const auto lay_out = [&] {
        args.shared = LlDispatchShared::of(common.arena, crew, common.topk, args.scale_bytes);
        return args.shared.bytes;
    };
    while (lay_out() > group.runtime().max_shared_bytes() && crew.receive_stages > 1) {
        --(crew.receive_stages > crew.num_stages ? crew.receive_stages : crew.num_stages);
    }
    return shape_of(group, common, args.row_bytes, args.shared.bytes, blocks, "dispatch");
}

LaunchShape plan_ll_combine(const Group& group, LlCombineArgs& args) {
    LlCommon& common = args.common;
    LlCrew& crew = common.crew;
    const Staffing staffing = staffing_for(group.communicator().world(), kGpuCombineStages, args.wire_bytes);
    crew = staffing.crew;
    common.tagged_tokens = std::min(staffing.tagged_tokens, common.arena.tagged_tokens());
    if (args.wire == LlCombineWire::kNvfp4) crew.chunk_bytes = args.wire_bytes;  // block scales follow the payload
    const bool is_gpu = group.communicator().world() == World::kCuda;
    args.segment_bytes = is_gpu ? kGpuSegmentBytes : std::max(args.row_bytes, 16u);
    args.segments = (args.row_bytes + args.segment_bytes - 1) / args.segment_bytes;
    const uint32_t blocks = blocks_for(group, group.config().combine_sms, common.num_tokens);
    const auto lay_out = [&] {
        args.shared = LlCombineShared::of(common.arena, crew, common.topk);
        return args.shared.bytes;
    };
    while (lay_out() > group.runtime().max_shared_bytes() && crew.num_stages > 1) --crew.num_stages;
    return shape_of(group, common, args.row_bytes, args.shared.bytes, blocks, "combine");
}

}  // namespace crossdock
