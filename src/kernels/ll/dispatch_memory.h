// SPDX-License-Identifier: Apache-2.0
// A dispatch's shared memory: one description for the launch and the kernel.
#pragma once

#include "device/row_stage.h"
#include "kernels/ll/geometry.h"

namespace crossdock {

// The targets of one token's row, in shared memory: the ranks that it goes to, in the order of their first choices.
struct TokenPlan {
    std::byte** rows;      // [targets] the slot there; null: the peer is lost, or it is own_target
    uint32_t* expert_ids;  // [k] or kDropped
    uint32_t* ranks;       // [k] or kDropped
    uint32_t* numbers;     // [k] among this source's rows for that expert; expert-major
    uint32_t* weights;     // [k] bits; rank-major and elastic
    uint32_t* row_idx;     // [targets] among this source's rows there
    uint32_t* choices;     // [targets] the rank's first choice
    uint32_t* num_targets;
    uint32_t* own_target;  // which of the targets is this rank, if its row stays; else kDropped

    CROSSDOCK_HOST_DEVICE constexpr void lay_out(auto& memory, uint32_t topk) {
        memory.take(rows, topk);
        memory.take(expert_ids, topk);
        memory.take(ranks, topk);
        memory.take(numbers, topk);
        memory.take(weights, topk);
        memory.take(row_idx, topk);
        memory.take(choices, topk);
        memory.take(num_targets, 1);
        memory.take(own_target, 1);
    }
};

// The places of a warp's current row, in shared memory.
struct Placement {
    uint32_t* rows;     // [topk] indices among all out rows
    uint32_t* columns;  // [topk] indices among the expert's rows (rank-major: among all), if scales are transposed
    uint32_t* num;
    uint32_t* direct;

    CROSSDOCK_HOST_DEVICE constexpr void lay_out(auto& memory, uint32_t topk) {
        memory.take(rows, topk);
        memory.take(columns, topk);
        memory.take(num, 1);
        memory.take(direct, 1);
    }
};

// The sources' announced counts, in shared memory.
struct Announced {
    uint32_t* rows;          // [ranks]
    uint32_t* choices;       // [ranks] of experts here; expert-major
    uint32_t* plain_before;  // [ranks + 1]: plain rows in the buffer of the sources below
    uint32_t* ll128;         // [ranks]: LL128 rows; then the largest number of them
    uint32_t* first_rows;    // [ranks][local experts]: where a source's rows of an expert begin; expert-major
    uint32_t* expert_rows;   // [local experts]; elastic, and where rows are published
    // Elastic.
    uint32_t* rows_before;  // [ranks + 1]: rows of the sources below
    uint32_t* padded_rows;  // [local experts]: rounded up to the alignment
    uint32_t* zones;        // [local experts]: where an expert's rows begin
};

// After LlBlockHead.
struct LlDispatchShared {
    SharedRegion<uint32_t> expert_counts;  // send: [experts] choices counted so far
    // send: [ranks] rows counted so far; with several LSA teams, [2][ranks + 1] follow (RoutingCounter::first_rows).
    SharedRegion<uint32_t> rank_counts;
    SharedRegion<uint32_t> first_rows;   // receive: [ranks][local experts]
    SharedRegion<uint32_t> zones;        // receive: [3][local experts] of elastic dispatches
    SharedRegion<uint32_t> received;     // receive: [5][ranks + 1]
    SharedRegion<std::byte> plans;       // send: [stages] TokenPlan
    SharedRegion<std::byte> placements;  // receive: [warps] Placement
    SharedRegion<std::byte> stages;      // [stages + receive stages][stage_bytes]
    uint32_t stage_bytes;
    uint32_t tail;  // in a stage's data, after a full chunk: scales
    uint32_t bytes;

    static constexpr LlDispatchShared of(const LlGeometry& arena, const LlWarpLayout& warp_layout, uint32_t topk,
                                         uint32_t scale_bytes) {
        LlDispatchShared shared{};
        shared.tail = warp_layout.chunk_bytes;
        shared.stage_bytes = static_cast<uint32_t>(
            align_up(uint64_t{kStageHeadBytes} + warp_layout.chunk_bytes + align_up(scale_bytes, 16), 128));
        Cursor memory(16, LlBlockHead::bytes(arena.num_ranks));
        memory.take(shared.expert_counts, arena.num_experts);
        memory.take(shared.rank_counts, arena.num_ranks + (arena.has_several_teams ? 2 * (arena.num_ranks + 1) : 0));
        memory.take(shared.first_rows, arena.num_experts);
        memory.take(shared.zones, uint64_t{3} * arena.experts_per_rank());
        memory.take(shared.received, uint64_t{5} * (arena.num_ranks + 1));
        memory.take(shared.plans, warp_layout.num_stages, view_bytes<TokenPlan>(topk));
        memory.take(shared.placements, warp_layout.warps_per_block, view_bytes<Placement>(topk));
        memory.align(128);
        memory.take(shared.stages, warp_layout.num_stages + warp_layout.receive_stages, shared.stage_bytes);
        shared.bytes = static_cast<uint32_t>(memory.end());
        return shared;
    }
};

}  // namespace crossdock
