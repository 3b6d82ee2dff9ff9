// SPDX-License-Identifier: Apache-2.0
// Dispatch: which slots a token's row goes to. A slot's number is a count over the source's own earlier tokens, so every
// block finds it alone.
#pragma once

#include "device/row_stage.h"
#include "kernels/ll/operation.h"

namespace crossdock {

// Where one token's row goes, in shared memory.
struct TokenPlan {
    std::byte** rows;     // [d] the slot at the d-th distinct rank, in the form that this source's rows take; null: lost
    int32_t* expert_ids;  // [k]; -1: dropped
    int32_t* ranks;       // [k]; -1: dropped
    int32_t* positions;   // [k] among this source's rows for that expert
    int32_t* slots;       // [d] among this source's slots there
    int32_t* choices;     // [d] the rank's first choice
    int32_t* num_targets;

    CROSSDOCK_HOST_DEVICE static constexpr uint64_t bytes(uint32_t topk) {
        return align_up(uint64_t{8 + 5 * 4} * topk + 4, 16);
    }
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
        at = align_up(at + TokenPlan::bytes(c.topk) * c.num_stages, 16);
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
    std::byte* memory = ctx.shared_memory() + shared.plans + TokenPlan::bytes(topk) * stage;
    int32_t* words = reinterpret_cast<int32_t*>(memory + uint64_t{8} * topk);
    return {reinterpret_cast<std::byte**>(memory), words,           words + topk, words + 2 * topk, words + 3 * topk,
            words + 4 * topk,                      words + 5 * topk};
}

// The stages for rows on their way out come first, those for rows on their way in follow.
CROSSDOCK_DEVICE RowStage stage_of(const Ctx& ctx, const LlDispatchShared& shared, uint32_t stage) {
    return RowStage(ctx.shared_memory() + shared.stages + uint64_t{shared.stage_bytes} * stage);
}

CROSSDOCK_DEVICE void init_stages(const Ctx& ctx, const LlDispatchArgs& args, const LlDispatchShared& shared) {
    if (!has_duty(ctx, 0)) return;
    const uint32_t stages = args.common.num_stages + args.receive_stages;
    CROSSDOCK_ROLLED
    for (uint32_t i = static_cast<uint32_t>(ctx.lane()); i < stages; i += kLanes) stage_of(ctx, shared, i).init();
    RowStage::initialised();
    ctx.warp_sync();
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
    CROSSDOCK_ROLLED
    for (int i = thread_idx(ctx); i < static_cast<int>(c.arena.num_experts); i += threads) counts.experts[i] = 0;
    CROSSDOCK_ROLLED
    for (int i = thread_idx(ctx); i < static_cast<int>(c.arena.num_ranks); i += threads) counts.ranks[i] = 0;
}

// Adds tokens [begin, end): a thread takes a token. Followed by a barrier of the block.
CROSSDOCK_DEVICE void count_tokens(const Ctx& ctx, const LlCommon& c, uint32_t begin, uint32_t end,
                                   const RoutingCounts& counts) {
    constexpr uint32_t kIdsAtOnce = 8;
    constexpr uint32_t kRanksInMask = 64;
    const bool has_mask = c.arena.num_ranks <= kRanksInMask;
    CROSSDOCK_ROLLED
    for (uint32_t token = begin + static_cast<uint32_t>(thread_idx(ctx)); token < end;
         token += static_cast<uint32_t>(num_threads(ctx))) {
        uint64_t ranks = 0;
        CROSSDOCK_ROLLED
        for (uint32_t base = 0; base < c.topk; base += kIdsAtOnce) {
            int32_t ids[kIdsAtOnce];
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kIdsAtOnce; ++i) ids[i] = base + i < c.topk ? expert_id(c, token, base + i) : -1;
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kIdsAtOnce; ++i) {
                if (ids[i] < 0) continue;
                if (c.expert_major) ctx.add_shared(counts.experts + ids[i], 1);
                const int rank = rank_of_expert(c, ids[i]);
                const bool is_first =
                    has_mask ? (ranks >> rank & 1) == 0 : is_first_of_rank(c, token, base + i, rank);
                if (has_mask) ranks |= uint64_t{1} << rank;
                if (is_first) ctx.add_shared(counts.ranks + rank, 1);
            }
        }
    }
}

// One warp looks up a token's routing.
CROSSDOCK_DEVICE void load_plan(const Ctx& ctx, const LlCommon& c, uint32_t token, const TokenPlan& plan) {
    CROSSDOCK_ROLLED
    for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < c.topk; k += kLanes) {
        plan.expert_ids[k] = expert_id(c, token, k);
        plan.ranks[k] = rank_of_expert(c, plan.expert_ids[k]);
    }
    ctx.warp_sync();
}

// Then the same warp plans it. counts cover the tokens before first, whose successors up to the token are counted here.
CROSSDOCK_DEVICE void plan_token(const Ctx& ctx, const LlCommon& c, const Operation& operation, uint32_t first,
                                 uint32_t token, const RoutingCounts& counts, const TokenPlan& plan) {
    const bool is_tagged = c.num_tokens <= c.tagged_tokens;
    int num_targets = 0;
    CROSSDOCK_ROLLED
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
            CROSSDOCK_ROLLED
            for (uint32_t j = 0; j < k; ++j) {
                position += plan.expert_ids[j] == id ? 1 : 0;
                is_first = is_first && plan.ranks[j] != rank;
            }
            CROSSDOCK_ROLLED
            for (uint32_t earlier = first; earlier < token; ++earlier) {
                bool goes_there = false;
                CROSSDOCK_ROLLED
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
            const int peer = plan.ranks[k];
            const uint32_t i = static_cast<uint32_t>(slot);
            std::byte* row = is_tagged ? reinterpret_cast<std::byte*>(
                                             tagged_row(c, peer, operation.buffer, tagged_slot(c, c.rank, i)))
                                       : plain_row(c, peer, operation.buffer, plain_slot(c, c.rank, i));
            plan.slots[target] = slot;
            plan.choices[target] = static_cast<int32_t>(k);
            plan.rows[target] = wait_credit(ctx, c, operation, peer) ? row : nullptr;
        }
        num_targets += ctx.warp_sum(is_first ? 1 : 0);
    }
    if (is_leader(ctx)) *plan.num_targets = num_targets;
    ctx.warp_sync();
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
