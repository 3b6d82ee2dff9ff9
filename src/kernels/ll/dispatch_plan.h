// SPDX-License-Identifier: Apache-2.0
// Dispatch: which slots a token's row goes to. A slot's number is a count over the source's own earlier tokens, so every
// block finds it alone.
#pragma once

#include "device/row_stage.h"
#include "kernels/ll/operation.h"

namespace crossdock {

// Where one token's row goes: arrays of topk 32-bit words in shared memory.
struct TokenPlan {
    int32_t* expert_ids;  // [k]; -1: dropped
    int32_t* ranks;       // [k]; -1: dropped
    int32_t* positions;   // [k] among this source's rows for that expert
    int32_t* slots;       // [d] at the d-th distinct rank
    int32_t* choices;     // [d] its first choice
    int32_t* num_targets; // distinct ranks

    CROSSDOCK_HOST_DEVICE static constexpr uint32_t words(uint32_t topk) { return 5 * topk + 1; }
};

// A block's shared memory: one description for the launch and the kernel. Offsets in bytes.
struct LlDispatchShared {
    uint32_t expert_counts;  // send: i32 [experts] choices counted so far
    uint32_t rank_counts;    // send: i32 [ranks] rows counted so far
    uint32_t first_rows;     // receive: i32 [ranks][local experts]
    uint32_t first_choices;  // receive: i32 [ranks][local experts]
    uint32_t received;       // receive: i32 [4][ranks + 1]
    uint32_t plans;          // send: [stages] plans
    uint32_t placements;     // receive: i32 [warps][topk + 2]
    uint32_t stages;          // [stages + receive stages][stage_bytes]
    uint32_t stage_bytes;
    uint32_t tail;  // in a stage's data, behind a full chunk: scales
    uint32_t bytes;

    CROSSDOCK_HOST_DEVICE static constexpr LlDispatchShared of(const LlDispatchArgs& args) {
        const LlCommon& c = args.common;
        LlDispatchShared shared{};
        uint64_t at = LlBlockHead::bytes(c.arena.num_ranks);
        shared.expert_counts = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{4} * c.arena.num_experts, 16);
        shared.rank_counts = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{4} * c.arena.num_ranks, 16);
        shared.first_rows = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{4} * c.arena.num_experts, 16);
        shared.first_choices = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{4} * c.arena.num_experts, 16);
        shared.received = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{16} * (c.arena.num_ranks + 1), 16);
        shared.plans = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{4} * TokenPlan::words(c.topk) * c.num_stages, 16);
        shared.placements = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{4} * (c.topk + 2) * c.warps_per_block, 128);
        shared.stages = static_cast<uint32_t>(at);
        shared.tail = c.chunk_bytes;
        shared.stage_bytes =
            static_cast<uint32_t>(align_up(uint64_t{kStageHeadBytes} + c.chunk_bytes + align_up(args.scale_bytes, 16), 128));
        shared.bytes =
            static_cast<uint32_t>(at + uint64_t{shared.stage_bytes} * (c.num_stages + args.receive_stages));
        return shared;
    }
};

inline namespace CROSSDOCK_WORLD {

CROSSDOCK_DEVICE TokenPlan token_plan(const Ctx& ctx, const LlDispatchArgs& args, const LlDispatchShared& shared,
                                      uint32_t stage) {
    const uint32_t topk = args.common.topk;
    int32_t* words = reinterpret_cast<int32_t*>(ctx.shared_memory() + shared.plans) + TokenPlan::words(topk) * stage;
    return {words, words + topk, words + 2 * topk, words + 3 * topk, words + 4 * topk, words + 5 * topk};
}

// The stages for rows on their way out come first, those for rows on their way in follow.
CROSSDOCK_DEVICE RowStage stage_of(const Ctx& ctx, const LlDispatchShared& shared, uint32_t stage) {
    return RowStage(ctx.shared_memory() + shared.stages + uint64_t{shared.stage_bytes} * stage);
}

// One thread of the block, before anything else is done with them.
CROSSDOCK_DEVICE void init_stages(const Ctx& ctx, const LlDispatchArgs& args, const LlDispatchShared& shared) {
    if (ctx.warp_idx() != ctx.num_warps() - 1 || !is_leader(ctx)) return;
    for (uint32_t i = 0; i < args.common.num_stages + args.receive_stages; ++i) stage_of(ctx, shared, i).init();
}

// What one block counts of its rank's routing.
struct RoutingCounts {
    int* experts;  // [experts] choices
    int* ranks;    // [ranks] rows
};

CROSSDOCK_DEVICE RoutingCounts routing_counts(const Ctx& ctx, const LlDispatchShared& shared) {
    return {reinterpret_cast<int*>(ctx.shared_memory() + shared.expert_counts),
            reinterpret_cast<int*>(ctx.shared_memory() + shared.rank_counts)};
}

// Followed by a barrier of the block.
CROSSDOCK_DEVICE void clear_counts(const Ctx& ctx, const LlCommon& c, const RoutingCounts& counts) {
    const int threads = num_threads(ctx);
    for (int i = thread_idx(ctx); i < static_cast<int>(c.arena.num_experts); i += threads) counts.experts[i] = 0;
    for (int i = thread_idx(ctx); i < static_cast<int>(c.arena.num_ranks); i += threads) counts.ranks[i] = 0;
}

// Adds tokens [begin, end): a thread takes a token. Followed by a barrier of the block.
CROSSDOCK_DEVICE void count_tokens(const Ctx& ctx, const LlCommon& c, uint32_t begin, uint32_t end,
                                   const RoutingCounts& counts) {
    constexpr uint32_t kRanksInMask = 64;
    const bool has_mask = c.arena.num_ranks <= kRanksInMask;
    for (uint32_t token = begin + static_cast<uint32_t>(thread_idx(ctx)); token < end;
         token += static_cast<uint32_t>(num_threads(ctx))) {
        uint64_t ranks = 0;
        for (uint32_t k = 0; k < c.topk; ++k) {
            const int32_t id = expert_id(c, token, k);
            if (id < 0) continue;
            if (c.expert_major) ctx.add_shared(counts.experts + id, 1);
            const int rank = rank_of_expert(c, id);
            const bool is_first = has_mask ? (ranks >> rank & 1) == 0 : is_first_of_rank(c, token, k, rank);
            if (has_mask) ranks |= uint64_t{1} << rank;
            if (is_first) ctx.add_shared(counts.ranks + rank, 1);
        }
    }
}

// One warp plans token first + i; counts cover the tokens before first, whose successors up to the token are counted
// here.
CROSSDOCK_DEVICE void plan_token(const Ctx& ctx, const LlCommon& c, uint32_t first, uint32_t i,
                                 const RoutingCounts& counts, const TokenPlan& plan) {
    const uint32_t token = first + i;
    for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < c.topk; k += kLanes) {
        plan.expert_ids[k] = expert_id(c, token, k);
        plan.ranks[k] = rank_of_expert(c, plan.expert_ids[k]);
    }
    ctx.warp_sync();
    int num_targets = 0;
    for (uint32_t base = 0; base < c.topk; base += kLanes) {
        const uint32_t k = base + static_cast<uint32_t>(ctx.lane());
        const bool is_sent = k < c.topk && plan.ranks[k] >= 0;
        bool is_first = is_sent;
        int position = 0;
        int slot = 0;
        if (is_sent) {
            const int32_t id = plan.expert_ids[k];
            const int rank = plan.ranks[k];
            position = c.expert_major ? counts.experts[id] : 0;
            slot = counts.ranks[rank];
            for (uint32_t j = 0; j < k; ++j) {
                position += plan.expert_ids[j] == id ? 1 : 0;
                is_first = is_first && plan.ranks[j] != rank;
            }
            for (uint32_t earlier = first; earlier < token; ++earlier) {
                bool goes_there = false;
                for (uint32_t j = 0; j < c.topk; ++j) {
                    const int32_t other = expert_id(c, earlier, j);
                    position += other == id ? 1 : 0;
                    goes_there = goes_there || rank_of_expert(c, other) == rank;
                }
                slot += goes_there ? 1 : 0;
            }
        }
        const int target = num_targets + ctx.warp_sum_before(is_first ? 1 : 0);
        if (k < c.topk) plan.positions[k] = position;
        if (is_first) {
            plan.slots[target] = slot;
            plan.choices[target] = static_cast<int32_t>(k);
        }
        num_targets += ctx.warp_sum(is_first ? 1 : 0);
    }
    if (is_leader(ctx)) *plan.num_targets = num_targets;
    ctx.warp_sync();
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
