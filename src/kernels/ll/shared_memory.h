// SPDX-License-Identifier: Apache-2.0
// How a block of the low-latency kernels is manned, and what is where in its shared memory: set by the host for a
// launch.
#pragma once

#include "device/row_stage.h"
#include "kernels/ll/geometry.h"

namespace crossdock {

struct LlCrew {
    uint32_t warps_per_block;
    uint32_t receive_warps;   // the block's last warps receive; a warp may do both, one after the other
    uint32_t num_stages;      // a block's: rows on their way out
    uint32_t receive_stages;  // dispatch: rows on their way in; the block's last warps have one each
    uint32_t chunk_bytes;     // of a row in one trip through a stage
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
    uint32_t verdict;     // of must_receive_again
    uint32_t is_refused;  // 1: the group has failed before anything was received
    uint32_t reserved;

    CROSSDOCK_HOST_DEVICE static constexpr uint64_t bytes(uint32_t num_ranks) {
        return align_up(sizeof(LlBlockHead) + 8 * uint64_t{num_ranks}, 16);
    }
};

// Where one token's row goes, in shared memory.
struct TokenPlan {
    std::byte** rows;  // [d] the slot at the d-th distinct rank, in the form that this source's rows take; null: lost
    int32_t* expert_ids;  // [k]; -1: dropped
    int32_t* ranks;       // [k]; -1: dropped
    uint32_t* extras;  // [k] what goes with a choice: its place among this source's rows for that expert, or its weight
    int32_t* slots;    // [d] among this source's slots there
    int32_t* choices;  // [d] the rank's first choice
    int32_t* num_targets;

    CROSSDOCK_HOST_DEVICE static constexpr uint32_t bytes(uint32_t topk) { return (28 * topk + 4 + 15) / 16 * 16; }
};

// A block's shared memory: one description for the launch and the kernel. Offsets in bytes.
struct LlDispatchShared {
    uint32_t expert_counts;  // send: i32 [experts] choices counted so far
    uint32_t rank_counts;    // send: i32 [ranks] rows counted so far
    uint32_t first_rows;     // receive: i32 [ranks][local experts]
    uint32_t received;       // receive: i32 [4][ranks + 1]
    uint32_t plans;          // send: [stages] plans
    uint32_t placements;     // receive: i32 [warps][topk + 2]
    uint32_t stages;         // [stages + receive stages][stage_bytes]
    uint32_t stage_bytes;
    uint32_t tail;  // in a stage's data, behind a full chunk: scales
    uint32_t bytes;

    static constexpr LlDispatchShared of(const LlGeometry& arena, const LlCrew& crew, uint32_t topk,
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
        at = align_up(at + TokenPlan::bytes(topk) * crew.num_stages, 16);
        shared.placements = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{4} * (topk + 2) * crew.warps_per_block, 128);
        shared.stages = static_cast<uint32_t>(at);
        shared.tail = crew.chunk_bytes;
        shared.stage_bytes = static_cast<uint32_t>(
            align_up(uint64_t{kStageHeadBytes} + crew.chunk_bytes + align_up(scale_bytes, 16), 128));
        shared.bytes =
            static_cast<uint32_t>(at + uint64_t{shared.stage_bytes} * (crew.num_stages + crew.receive_stages));
        return shared;
    }
};

// Offsets in bytes.
struct LlCombineShared {
    uint32_t return_counts;  // i32 [2][ranks + 1]
    uint32_t terms;          // i64 [warps][topk], f32 [warps][topk], i32 [warps][topk]
    uint32_t far_ranks;      // u32 [ranks] 1: has tokens of this rank; of groups of several load/store domains
    uint32_t stages;
    uint32_t stage_bytes;
    uint32_t bytes;

    static constexpr LlCombineShared of(const LlGeometry& arena, const LlCrew& crew, uint32_t topk,
                                        bool has_several_domains) {
        LlCombineShared shared{};
        uint64_t at = LlBlockHead::bytes(arena.num_ranks);
        shared.return_counts = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{8} * (arena.num_ranks + 1), 16);
        shared.terms = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{16} * topk * crew.warps_per_block, 128);
        shared.far_ranks = static_cast<uint32_t>(at);
        if (has_several_domains) at = align_up(at + uint64_t{4} * arena.num_ranks, 128);
        shared.stages = static_cast<uint32_t>(at);
        shared.stage_bytes = static_cast<uint32_t>(align_up(uint64_t{kStageHeadBytes} + crew.chunk_bytes, 128));
        shared.bytes = static_cast<uint32_t>(at + uint64_t{shared.stage_bytes} * crew.num_stages);
        return shared;
    }
};

}  // namespace crossdock
