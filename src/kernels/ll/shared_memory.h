// SPDX-License-Identifier: Apache-2.0
// What the warps of a low-latency block do, and what is where in its shared memory: set by the host for a launch.
#pragma once

#include "device/row_stage.h"
#include "kernels/ll/geometry.h"

namespace crossdock {

struct LlWarpLayout {
    uint32_t warps_per_block;
    uint32_t receive_warps;   // the block's last warps receive; a warp may do both, one after the other
    uint32_t num_stages;      // a block's: rows on their way out
    uint32_t receive_stages;  // dispatch: rows on their way in; the block's last warps have one each
    uint32_t chunk_bytes;     // of a row that a stage takes at once
};

// The beginning of every block's shared memory, followed by u64 [ranks]: the latest operation that each peer has
// entered as far as this block has seen.
struct LlBlockHead {
    uint64_t clock;
    uint64_t start_ns;
    uint64_t free_from[2 * kNumBuffers];
    uint64_t pending_epoch;
    uint32_t pending_buffer;
    uint32_t losses;
    uint32_t has_failed;
    uint32_t verdict;     // of must_receive_again and is_last_to_put
    uint32_t is_refused;  // 1: the group has failed before anything was received
    uint32_t reserved;

    CROSSDOCK_HOST_DEVICE static constexpr uint64_t bytes(uint32_t num_ranks) {
        return align_up(sizeof(LlBlockHead) + 8 * uint64_t{num_ranks}, 16);
    }
};

// Where one token's row goes, in shared memory. Ranks that the token goes to (its targets) are in the order of their
// first choices.
struct TokenPlan {
    std::byte** rows;      // [targets] the slot there, in the form that this source's rows have; null: the peer is lost
    uint32_t* expert_ids;  // [k] or kDropped
    uint32_t* ranks;       // [k] or kDropped
    uint32_t* extras;      // [k] what goes with a choice: its place among this source's rows for that expert, or its
                           // weight
    uint32_t* slots;       // [targets] among this source's slots there
    uint32_t* choices;     // [targets] the rank's first choice
    uint32_t* num_targets;

    CROSSDOCK_HOST_DEVICE static constexpr uint32_t bytes(uint32_t topk) { return (28 * topk + 4 + 15) / 16 * 16; }
};

// A block's shared memory: one description for the launch and the kernel. Offsets in bytes.
struct LlDispatchShared {
    uint32_t expert_counts;  // send: i32 [experts] choices counted so far
    uint32_t rank_counts;    // send: i32 [ranks] rows counted so far
    uint32_t first_rows;     // receive: u32 [ranks][local experts]
    uint32_t received;       // receive: u32 [4][ranks + 1]
    uint32_t plans;          // send: [stages] plans
    uint32_t placements;     // receive: u32 [warps][topk + 2]
    uint32_t stages;         // [stages + receive stages][stage_bytes]
    uint32_t stage_bytes;
    uint32_t tail;  // in a stage's data, behind a full chunk: scales
    uint32_t bytes;

    static constexpr LlDispatchShared of(const LlGeometry& arena, const LlWarpLayout& warp_layout, uint32_t topk,
                                         uint32_t scale_bytes) {
        LlDispatchShared shared{};
        uint64_t at = LlBlockHead::bytes(arena.num_ranks);
        shared.expert_counts = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{4} * arena.num_experts, 16);
        shared.rank_counts = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{4} * arena.num_ranks, 16);
        shared.first_rows = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{4} * arena.num_experts, 16);
        shared.received = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{16} * (arena.num_ranks + 1), 16);
        shared.plans = static_cast<uint32_t>(at);
        at = align_up(at + TokenPlan::bytes(topk) * warp_layout.num_stages, 16);
        shared.placements = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{4} * (topk + 2) * warp_layout.warps_per_block, 128);
        shared.stages = static_cast<uint32_t>(at);
        shared.tail = warp_layout.chunk_bytes;
        shared.stage_bytes = static_cast<uint32_t>(
            align_up(uint64_t{kStageHeadBytes} + warp_layout.chunk_bytes + align_up(scale_bytes, 16), 128));
        shared.bytes = static_cast<uint32_t>(at + uint64_t{shared.stage_bytes} *
                                                      (warp_layout.num_stages + warp_layout.receive_stages));
        return shared;
    }
};

// Offsets in bytes.
struct LlCombineShared {
    uint32_t return_counts;  // i32 [2][ranks + 1]
    uint32_t terms;          // i64 [warps][topk], f32 [warps][topk], u32 [warps][topk]
    uint32_t gin_ranks;      // u32 [ranks] 1: has tokens of this rank; of groups of several LSA teams
    uint32_t stages;
    uint32_t stage_bytes;
    uint32_t bytes;

    static constexpr LlCombineShared of(const LlGeometry& arena, const LlWarpLayout& warp_layout, uint32_t topk,
                                        bool has_several_teams) {
        LlCombineShared shared{};
        uint64_t at = LlBlockHead::bytes(arena.num_ranks);
        shared.return_counts = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{8} * (arena.num_ranks + 1), 16);
        shared.terms = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{16} * topk * warp_layout.warps_per_block, 128);
        shared.gin_ranks = static_cast<uint32_t>(at);
        if (has_several_teams) at = align_up(at + uint64_t{4} * arena.num_ranks, 128);
        shared.stages = static_cast<uint32_t>(at);
        shared.stage_bytes = static_cast<uint32_t>(align_up(uint64_t{kStageHeadBytes} + warp_layout.chunk_bytes, 128));
        shared.bytes = static_cast<uint32_t>(at + uint64_t{shared.stage_bytes} * warp_layout.num_stages);
        return shared;
    }
};

inline namespace CROSSDOCK_VARIANT {

// Dispatch: those for rows on their way out come first, those for rows on their way in follow.
CROSSDOCK_DEVICE RowStage stage_of(const Ctx& ctx, const auto& shared, uint32_t stage) {
    return RowStage(ctx.shared_memory() + shared.stages + uint64_t{shared.stage_bytes} * stage);
}

}  // namespace CROSSDOCK_VARIANT
}  // namespace crossdock
