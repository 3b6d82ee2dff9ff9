// SPDX-License-Identifier: Apache-2.0
#include "core/ll/plan.h"

#include <algorithm>

#include "core/error.h"
#include "runtime/runtime.h"

namespace crossdock {
namespace {

constexpr uint32_t kGpuWarps = 16;
constexpr uint32_t kFewGpuWarps = 8;  // of short operations: fewer warps to start and to wait for
constexpr uint32_t kGpuReceiveWarps = 8;
constexpr uint32_t kGpuSendStages = 4;     // tokens of a block under way at once, one per warp
constexpr uint32_t kGpuCombineStages = 8;  // rows of a block under way at once
constexpr uint32_t kGpuChunkBytes =
    32768;  // long enough for full NVLink speed, short enough for several stages a block
constexpr uint32_t kGpuSegmentBytes = 1024;
constexpr uint32_t kLog2MostBlocksOfToken = 2;  // one SM stores few bytes per microsecond
// LL128 rows have more bytes than plain rows and one more copy, but no flags. They are faster in a dispatch of at most
// kFewDispatchTokens tokens, or of kMostLl128TokensOfDispatch if no block sends more than one row.
constexpr uint32_t kFewDispatchTokens = 16;
constexpr uint32_t kMostLl128TokensOfDispatch = 64;
constexpr uint32_t kFewCombineTokens = 64;
constexpr uint32_t kFewStayingTokens = 16;      // of an expert-major combine between GPUs
constexpr uint32_t kShortDispatchTokens = 256;  // kFewGpuWarps are enough
constexpr uint32_t kShortCombineTokens = 16;    // the same
constexpr uint32_t kFewestGpuBlocks = 64;       // other ranks' rows arrive even if this rank has few tokens
constexpr uint32_t kOverlapSms = 24;            // of a combine beside the experts' kernel, if the caller sets nothing
// Reads of one line of the host's memory appear to take turns, about 1 us each, and each block reads what the peers say
// of the operation. So few blocks are faster there.
constexpr uint32_t kHostTokensPerDispatchBlock = 4;
constexpr uint32_t kFewestHostDispatchBlocks = 4;
constexpr uint32_t kMostHostDispatchBlocks = 16;
constexpr uint32_t kHostRowsPerCombineBlock = 16;
constexpr uint32_t kHostStageBytes[] = {16384, 8192};  // of a combine's warp, for the rows that it sums; or none
constexpr uint32_t kFewestHostCombineBlocks = 2;
constexpr uint32_t kMostHostCombineBlocks = 32;
static_assert(kMostLl128RowBytes <= kGpuChunkBytes, "a stage holds a whole row that is sent as an LL128 row");
constexpr uint64_t kCpuCacheBytes = uint64_t{32} << 20;  // of a host, roughly: the last level of today's servers

// On a GPU, operations with few tokens have blocks of few warps.
bool chooses_warps(const Group& group) { return group.communicator().backend().warps == 0; }

// The layout with the most stages. plain: rows that are sent or received may be plain ones.
LlWarpLayout warp_layout_for(const BackendTraits& backend, uint32_t gpu_stages, uint32_t row_bytes, bool plain) {
    // Fewer warps than both roles need together: some both send and receive.
    if (backend.warps > 0) return {backend.warps, backend.warps_per_role, backend.stages, backend.stages, row_bytes};
    if (!plain) return {kGpuWarps, kGpuWarps, gpu_stages, 0, row_bytes};
    return {kGpuWarps, kGpuReceiveWarps, gpu_stages, kGpuReceiveWarps, std::min(row_bytes, kGpuChunkBytes)};
}

// The ranks that a token goes to, at most.
uint32_t most_targets(const LlCommon& common) { return std::min(common.topk, common.arena.num_ranks); }

uint32_t blocks_for(const Group& group, uint32_t most_sms, uint32_t work) {
    if (const uint32_t blocks = group.communicator().backend().blocks; blocks > 0) return blocks;
    // Ranks that share a device must all be resident at once, since their kernels wait for each other.
    const uint32_t resident = std::max(1u, most_sms / static_cast<uint32_t>(group.communicator().ranks_on_device()));
    return std::min(resident, std::max(kFewestGpuBlocks, work));
}

// In the host's memory. Several, since one block does not fill PCIe.
uint32_t host_blocks(const Group& group, uint32_t most_sms, uint32_t blocks, uint32_t fewest, uint32_t most) {
    return std::min(blocks_for(group, most_sms, 0), std::clamp(blocks, fewest, most));
}

// chosen: of the handle; 0: the group's number.
uint32_t lowered_sms(uint32_t most, uint32_t chosen) { return chosen == 0 ? most : std::min(most, chosen); }

// The blocks that send LL128 rows of a dispatch.
uint32_t blocks_of_ll128(const Group& group, const LlCommon& common, uint32_t most_sms) {
    return blocks_for(group, most_sms, 2 * common.num_tokens);
}

bool sends_ll128(const Group& group, const LlCommon& common, uint32_t most_sms) {
    const LlGeometry& arena = common.arena;
    const uint32_t tokens = common.num_tokens;
    if (tokens > arena.ll128_tokens) return false;
    // If the arena has room for only some ranks' rows as LL128 rows, rows return in the form in which they came, so all
    // of these ranks send LL128 rows.
    if (!arena.fits_all_in_ll128()) return true;
    if (tokens > group.communicator().backend().dispatch_ll128_tokens) return false;
    return tokens <= kFewDispatchTokens || (tokens <= kMostLl128TokensOfDispatch &&
                                            tokens * most_targets(common) <= blocks_of_ll128(group, common, most_sms));
}

// With LL128 rows, and if both halves run, half of the blocks send and half receive: an SM's loads wait behind its
// stores, and those wait for the link. This helps a rank that has its own GPU with few tokens, and ranks that share a
// GPU with few rows per sending block. The simulation uses both forms. rows: about how many this rank sends.
void share_blocks(const Group& group, LlCommon& common, bool is_ll128, uint32_t blocks, uint32_t few_tokens,
                  uint32_t rows, uint32_t few_rows_per_block) {
    const bool are_few =
        (blocks >= kFewestGpuBlocks && common.num_tokens <= few_tokens) || rows <= blocks / 2 * few_rows_per_block;
    // Blocks that wait for experts receive nothing meanwhile.
    const bool waits = common.overlap.done_value != 0;
    const bool pays = chooses_warps(group) ? are_few || waits : common.num_tokens % 2 == 1;
    const bool is_split = is_ll128 && pays && blocks > 1 && common.halves == (kSendHalf | kReceiveHalf);
    common.send_blocks = is_split ? blocks / 2 : blocks;
    common.receive_blocks = is_split ? blocks - blocks / 2 : blocks;
}

LaunchShape shape_of(const Group& group, const LlCommon& common, uint32_t row_bytes, uint32_t shared_bytes,
                     uint32_t blocks, const char* what) {
    require(shared_bytes <= group.max_shared_bytes(), ncclInvalidArgument,
            "{}: a block needs {} bytes of shared memory for one row's scales and {} experts, the device has {}", what,
            shared_bytes, common.arena.num_experts, group.max_shared_bytes());
    // Bytes that all ranks of the host move, if all have as many tokens.
    const uint64_t moved = uint64_t{common.num_tokens} * common.topk * row_bytes * group.config().num_ranks;
    // Not if ranks share a device: one rank's next kernel could take the SMs that another's kernel waits for.
    const bool is_alone = group.communicator().ranks_on_device() == 1 && !group.config().has_several_teams();
    return {static_cast<int>(blocks), static_cast<int>(common.warp_layout.warps_per_block), shared_bytes,
            is_alone && group.runtime().overlaps_kernels(), moved > kCpuCacheBytes};
}

// Kernels that sum own rows where they are address these and the buffer's rows by 32-bit numbers of 16 bytes.
bool are_rows_countable(const LlCombineArgs& args) {
    const LlCommon& common = args.common;
    const uint64_t experts = common.expert_major ? common.offsets.experts_per_rank : 1;
    const uint64_t rows = args.is_elastic ? args.elastic.rows : experts * common.offsets.num_slots;
    const uint64_t here = rows * args.row_bytes;
    return std::max(here, common.arena.num_rows() * common.offsets.row_stride) / 16 <= UINT32_MAX;
}
// Whether a combine of `rows` rows sums this rank's own ones where they are, instead of sending them to its own buffer.
// Next to rows that cross NVLink, sending them costs nothing, since those take longer. A few rank-major rows arrive
// earlier if they are sent, because sending starts before the operation is known.
bool own_rows_stay(const Group& group, const LlCombineArgs& args, uint32_t rows) {
    const LlCommon& common = args.common;
    const BackendTraits& backend = group.communicator().backend();
    const bool both_halves = common.halves == (kSendHalf | kReceiveHalf);
    if (args.wire != LlCombineWire::kRows || !both_halves || !are_rows_countable(args)) return false;
    if (args.is_elastic && common.expert_major) return false;  // a dispatch of this kind does not record own rows
    if (common.overlap.done_value != 0) return false;
    if (group.communicator().shares_host_memory()) return true;
    const bool crosses_links =
        backend.has_links && static_cast<uint32_t>(group.communicator().ranks_on_device()) < common.arena.num_ranks;
    if (crosses_links) return common.expert_major && common.num_tokens <= kFewStayingTokens;
    return (common.expert_major && backend.own_expert_rows_stay) || rows > backend.sent_own_rows;
}

}  // namespace

LaunchShape plan_ll_dispatch(const Group& group, LlDispatchArgs& args, uint32_t num_sms) {
    LlCommon& common = args.common;
    const uint32_t most_sms = lowered_sms(group.config().dispatch_sms, num_sms);
    LlWarpLayout& warp_layout = common.warp_layout;
    warp_layout = warp_layout_for(group.communicator().backend(), kGpuSendStages, args.row_bytes,
                                  true);  // peers may have more tokens
    const bool is_ll128 = sends_ll128(group, common, most_sms);
    common.own_rows_are_ll128 = is_ll128;
    uint32_t blocks =
        is_ll128 ? blocks_of_ll128(group, common, most_sms) : blocks_for(group, most_sms, common.num_tokens + 1);
    if (group.communicator().shares_host_memory())
        blocks = host_blocks(group, most_sms, common.num_tokens / kHostTokensPerDispatchBlock,
                             kFewestHostDispatchBlocks, kMostHostDispatchBlocks);
    share_blocks(group, common, is_ll128, blocks, kFewDispatchTokens, common.num_tokens * most_targets(common), 1);
    const uint32_t senders = std::max(1u, std::min(common.send_blocks, blocks - 1));  // the last one announces
    common.tokens_per_block = (common.num_tokens + senders - 1) / senders;
    while (common.num_tokens > 0 && is_ll128 && common.log2_blocks_per_token < kLog2MostBlocksOfToken &&
           common.num_tokens << (common.log2_blocks_per_token + 1) <= senders)
        ++common.log2_blocks_per_token;
    warp_layout.num_stages = std::clamp(common.tokens_per_block, 1u, warp_layout.num_stages);
    if (chooses_warps(group) && common.num_tokens <= kShortDispatchTokens) {
        // Warps that send a plain row each can't receive meanwhile; LL128 rows are sent by all warps, quickly.
        const bool receive_meanwhile = !is_ll128 && common.halves == (kSendHalf | kReceiveHalf);
        warp_layout.warps_per_block = kFewGpuWarps;
        warp_layout.receive_warps = receive_meanwhile ? kFewGpuWarps - warp_layout.num_stages : kFewGpuWarps;
        warp_layout.receive_stages = warp_layout.receive_warps;
    }
    const auto lay_out = [&] {
        args.shared = LlDispatchShared::of(common.arena, warp_layout, common.topk, args.scale_bytes);
        return args.shared.bytes;
    };
    while (lay_out() > group.max_shared_bytes() && warp_layout.num_stages + warp_layout.receive_stages > 2) {
        --(warp_layout.receive_stages > warp_layout.num_stages ? warp_layout.receive_stages : warp_layout.num_stages);
    }
    // After a loss one block receives all rows again, without the other blocks' stages: so not with masks.
    args.own_rows_stay = common.halves == (kSendHalf | kReceiveHalf) && !is_ll128 && common.scope.masking == 0 &&
                         common.overlap.memory == nullptr &&
                         common.tokens_per_block <= std::min(warp_layout.num_stages, warp_layout.receive_warps) &&
                         args.row_bytes <= warp_layout.chunk_bytes;
    // An SM has room for a block of this kernel and one of the next, but not for two of this one: if they start while
    // other SMs are busy, half of the SMs would do all the work.
    const size_t most = group.max_shared_bytes();
    const auto more_than_half = static_cast<uint32_t>(std::min(most, most / 2 + 1024));
    const uint32_t shared_bytes =
        chooses_warps(group) ? std::max(args.shared.bytes, more_than_half) : args.shared.bytes;
    return shape_of(group, common, args.row_bytes, shared_bytes, blocks, "dispatch");
}

LaunchShape plan_ll_combine(const Group& group, LlCombineArgs& args, uint32_t num_sms) {
    LlCommon& common = args.common;
    const bool overlaps = common.overlap.done_value != 0;
    const uint32_t most_sms = lowered_sms(group.config().combine_sms, num_sms == 0 && overlaps ? kOverlapSms : num_sms);
    LlWarpLayout& warp_layout = common.warp_layout;
    const bool plain = !common.arena.fits_all_in_ll128() || is_quantised(args.wire);
    warp_layout =
        warp_layout_for(group.communicator().backend(), plain ? kGpuCombineStages : 0, args.wire_bytes, plain);
    common.own_rows_are_ll128 = common.num_tokens <= common.arena.ll128_tokens;
    args.forms = plain ? RowForms::kBoth : RowForms::kLl128;
    if (is_quantised(args.wire)) warp_layout.chunk_bytes = args.wire_bytes;  // scales follow the payload
    const bool splits_rows = group.communicator().backend().splits_rows;
    args.segment_bytes = splits_rows ? kGpuSegmentBytes : std::max(args.row_bytes, 16u);
    if (chooses_warps(group) && !plain && common.num_tokens <= kShortCombineTokens && !overlaps)
        warp_layout.warps_per_block = kFewGpuWarps;
    uint32_t blocks = blocks_for(group, most_sms, plain ? common.num_tokens : 2 * common.num_tokens);
    const bool has_row_per_choice = common.expert_major && args.wire != LlCombineWire::kSums;
    const uint32_t rows = common.num_tokens * (has_row_per_choice ? common.topk : most_targets(common));
    if (group.communicator().shares_host_memory()) {
        warp_layout.warps_per_block = kFewGpuWarps;
        blocks = host_blocks(group, most_sms, rows / kHostRowsPerCombineBlock, kFewestHostCombineBlocks,
                             kMostHostCombineBlocks);
        // As few parts of a row as keep all warps busy.
        const uint32_t parts = std::max(1u, blocks * kFewGpuWarps / std::max(1u, common.num_tokens));
        args.segment_bytes *= std::max(1u, args.row_bytes / kGpuSegmentBytes / parts);
    }
    warp_layout.receive_warps = warp_layout.warps_per_block;
    args.segments = (args.row_bytes + args.segment_bytes - 1) / args.segment_bytes;
    args.own_rows_stay = own_rows_stay(group, args, rows);
    const bool sends_rows = common.arena.num_ranks > 1 || !args.own_rows_stay;
    share_blocks(group, common, !plain && sends_rows, blocks, kFewCombineTokens, rows, 2);
    uint32_t receive_stage_bytes = 0;
    const auto fits = [&] {
        args.shared = LlCombineShared::of(common.arena, warp_layout, common.topk, group.config().has_several_teams(),
                                          receive_stage_bytes);
        return args.shared.bytes <= group.max_shared_bytes();
    };
    const auto fits_with_fewer_stages = [&] {
        while (!fits() && warp_layout.num_stages > 1) --warp_layout.num_stages;
        return fits();
    };
    const uint32_t stages = warp_layout.num_stages;
    if (common.arena.is_in_host_memory && !is_quantised(args.wire)) {
        for (const uint32_t bytes : kHostStageBytes) {
            receive_stage_bytes = kStageHeadBytes + bytes;
            if (fits()) break;
        }
    }
    if (!fits_with_fewer_stages() && receive_stage_bytes > 0) {
        receive_stage_bytes = 0;
        warp_layout.num_stages = stages;
        fits_with_fewer_stages();
    }
    return shape_of(group, common, args.row_bytes, args.shared.bytes, blocks, "combine");
}

}  // namespace crossdock
