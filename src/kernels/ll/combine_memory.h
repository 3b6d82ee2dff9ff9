// SPDX-License-Identifier: Apache-2.0
// A combine's shared memory: one description for the launch and the kernel.
#pragma once

#include "device/row_stage.h"
#include "kernels/ll/geometry.h"

namespace crossdock {

// The rows that warps sum, and their ranks, in shared memory: each warp has topk of each.
struct SummandLists {
    int64_t* index;
    float* weight;
    uint32_t* ranks;

    CROSSDOCK_HOST_DEVICE constexpr void lay_out(auto& memory, uint32_t summands) {
        memory.take(index, summands);
        memory.take(weight, summands);
        memory.take(ranks, summands);
    }
};

// After LlBlockHead.
struct LlCombineShared {
    SharedRegion<uint32_t> return_counts;  // [2][ranks + 1], [ranks]
    SharedRegion<std::byte> summands;      // SummandLists of all warps
    SharedRegion<uint32_t> gin_ranks;      // [ranks] 1: has tokens of this rank; of groups of several LSA teams
    SharedRegion<std::byte> stages;
    SharedRegion<std::byte> receive_stages;  // of each warp, for rows in the host's memory (StagedSums)
    uint32_t stage_bytes;
    uint32_t receive_stage_bytes;  // 0: there are none
    uint32_t bytes;

    static constexpr LlCombineShared of(const LlGeometry& arena, const LlWarpLayout& warp_layout, uint32_t topk,
                                        bool has_several_teams, uint32_t receive_stage_bytes) {
        LlCombineShared shared{};
        shared.stage_bytes = static_cast<uint32_t>(align_up(uint64_t{kStageHeadBytes} + warp_layout.chunk_bytes, 128));
        Cursor memory(16, LlBlockHead::bytes(arena.num_ranks));
        memory.take(shared.return_counts, uint64_t{3} * (arena.num_ranks + 1));
        memory.take(shared.summands, 1, view_bytes<SummandLists>(topk * warp_layout.warps_per_block));
        memory.align(128);
        memory.take(shared.gin_ranks, has_several_teams ? arena.num_ranks : 0);
        memory.take(shared.stages, warp_layout.num_stages, shared.stage_bytes);
        shared.receive_stage_bytes = receive_stage_bytes;
        memory.align(128);
        memory.take(shared.receive_stages, warp_layout.warps_per_block, receive_stage_bytes);
        shared.bytes = static_cast<uint32_t>(memory.end());
        return shared;
    }
};

}  // namespace crossdock
