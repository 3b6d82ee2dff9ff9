// SPDX-License-Identifier: Apache-2.0
// Dispatch: which slots a token's row goes to. A slot's number is a count over the source's own earlier tokens, so
// every block finds it alone.
#pragma once

#include "device/row_stage.h"
#include "kernels/ll/operation.h"

namespace crossdock {

inline namespace CROSSDOCK_VARIANT {

CROSSDOCK_DEVICE TokenPlan token_plan(const Ctx& ctx, const auto& args, const LlDispatchShared& shared,
                                      uint32_t stage) {
    const uint32_t topk = args.common.topk;
    std::byte* memory = ctx.shared_memory() + shared.plans + TokenPlan::bytes(topk) * stage;
    int32_t* words = reinterpret_cast<int32_t*>(memory + uint64_t{8} * topk);
    return {reinterpret_cast<std::byte**>(memory),
            words,
            words + topk,
            reinterpret_cast<uint32_t*>(words + 2 * topk),
            words + 3 * topk,
            words + 4 * topk,
            words + 5 * topk};
}

// The stages for rows on their way out come first, those for rows on their way in follow.
CROSSDOCK_DEVICE RowStage stage_of(const Ctx& ctx, const LlDispatchShared& shared, uint32_t stage) {
    return RowStage(ctx.shared_memory() + shared.stages + uint64_t{shared.stage_bytes} * stage);
}

CROSSDOCK_DEVICE void init_stages(const Ctx& ctx, const auto& args, const LlDispatchShared& shared) {
    if (!has_duty(ctx, 0)) return;
    const uint32_t stages = args.common.crew.num_stages + args.common.crew.receive_stages;
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
CROSSDOCK_DEVICE void clear_counts(const Ctx& ctx, const auto& c, const RoutingCounts& counts) {
    const int threads = num_threads(ctx);
    CROSSDOCK_ROLLED
    for (int i = thread_idx(ctx); i < static_cast<int>(c.arena.num_experts); i += threads) counts.experts[i] = 0;
    CROSSDOCK_ROLLED
    for (int i = thread_idx(ctx); i < static_cast<int>(c.arena.num_ranks); i += threads) counts.ranks[i] = 0;
}

// Tokens [begin, end) where ranks do not fit into a mask: a thread takes a token.
CROSSDOCK_DEVICE_RARE void count_tokens_of_many_ranks(const Ctx& ctx, const auto& c, uint32_t begin, uint32_t end,
                                                      const RoutingCounts& counts) {
    CROSSDOCK_ROLLED
    for (uint32_t token = begin + static_cast<uint32_t>(thread_idx(ctx)); token < end;
         token += static_cast<uint32_t>(num_threads(ctx))) {
        CROSSDOCK_ROLLED
        for (uint32_t k = 0; k < c.topk; ++k) {
            const int32_t id = expert_id(c, token, k);
            if (id < 0) continue;
            if (c.expert_major) ctx.add_shared(counts.experts + id, 1);
            const int rank = rank_of_expert(c, id);
            if (is_first_of_rank(c, token, k, rank)) ctx.add_shared(counts.ranks + rank, 1);
        }
    }
}

// The first of a token's choices.
struct TokenIds {
    static constexpr uint32_t kMost = 8;
    int32_t ids[kMost];
};

// Of choices [base, base + kMost) of a token; -1 where there is none.
CROSSDOCK_DEVICE TokenIds load_ids(const auto& c, uint32_t token, uint32_t end, uint32_t base) {
    TokenIds loaded;
    int64_t given[TokenIds::kMost] = {};
    if (token < end) {  // all are on their way before the first is looked at
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < TokenIds::kMost; ++i)
            given[i] = given_id(c, token, base + i < c.topk ? base + i : base);
    }
    CROSSDOCK_UNROLL
    for (uint32_t i = 0; i < TokenIds::kMost; ++i)
        loaded.ids[i] = token < end && base + i < c.topk ? expert_of(c, given[i]) : -1;
    return loaded;
}

// Adds tokens [begin, end): a lane takes a token, a warp adds its lanes up. first: what load_ids gave for this thread's
// first token. Followed by a barrier of the block.
CROSSDOCK_DEVICE void count_tokens(const Ctx& ctx, const auto& c, uint32_t begin, uint32_t end, TokenIds first,
                                   const RoutingCounts& counts) {
    constexpr uint32_t kRanksInMask = 64;  // bits of `ranks`
    if (c.arena.num_ranks > kRanksInMask) return count_tokens_of_many_ranks(ctx, c, begin, end, counts);
    CROSSDOCK_ROLLED
    for (uint32_t warp_token = begin + static_cast<uint32_t>(ctx.warp_idx() * kLanes); warp_token < end;
         warp_token += static_cast<uint32_t>(num_threads(ctx))) {
        const uint32_t token = warp_token + static_cast<uint32_t>(ctx.lane());
        uint64_t ranks = 0;
        CROSSDOCK_ROLLED
        for (uint32_t base = 0;;) {
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < TokenIds::kMost; ++i) {
                if (first.ids[i] < 0) continue;
                ranks |= uint64_t{1} << rank_of_expert(c, first.ids[i]);
                if (c.expert_major) ctx.add_shared(counts.experts + first.ids[i], 1);
            }
            base += TokenIds::kMost;
            if (!has_choices_from(c, base)) break;
            first = load_ids(c, token, end, base);
        }
        CROSSDOCK_ROLLED
        for (uint32_t rank = 0; rank < c.arena.num_ranks; ++rank) {
            const int rows = ctx.warp_count((ranks >> rank & 1) != 0);
            if (is_leader(ctx) && rows > 0) ctx.add_shared(counts.ranks + rank, rows);
        }
        if (c.kFewTokens) break;
        first = load_ids(c, token + static_cast<uint32_t>(num_threads(ctx)), end, 0);
    }
}

// One warp looks up a token's routing.
CROSSDOCK_DEVICE void load_plan(const Ctx& ctx, const auto& args, uint32_t token, const TokenPlan& plan) {
    const auto& c = args.common;
    CROSSDOCK_ROLLED
    for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < c.topk; k += kLanes) {
        plan.expert_ids[k] = expert_id(c, token, k);
        plan.ranks[k] = rank_of_expert(c, plan.expert_ids[k]);
        if (!c.expert_major) plan.extras[k] = bits_of(args.topk_weights[uint64_t{token} * c.topk + k]);
    }
    ctx.warp_sync();
}

// How many choices a rank gets of the tokens before the one in `stage`: counts cover those before the batch. One warp.
CROSSDOCK_DEVICE uint32_t choices_before(const Ctx& ctx, const auto& args, const LlDispatchShared& shared,
                                         uint32_t stage, int rank) {
    const auto& c = args.common;
    const uint32_t experts = c.offsets.experts_per_rank;
    const int* of_rank = routing_counts(ctx, shared).experts + static_cast<uint32_t>(rank) * experts;
    int choices = 0;
    CROSSDOCK_ROLLED
    for (uint32_t i = static_cast<uint32_t>(ctx.lane()); i < experts; i += kLanes) choices += of_rank[i];
    CROSSDOCK_ROLLED
    for (uint32_t earlier = 0; earlier < stage; ++earlier) {
        const int32_t* ranks = token_plan(ctx, args, shared, earlier).ranks;
        CROSSDOCK_ROLLED
        for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < c.topk; k += kLanes) choices += ranks[k] == rank;
    }
    return static_cast<uint32_t>(ctx.warp_sum(choices));
}

// Then, behind a barrier of the block, the same warp plans it. counts cover the tokens before the batch; those in the
// stages before this one are counted here.
CROSSDOCK_DEVICE void plan_token(const Ctx& ctx, const auto& args, const LlDispatchShared& shared,
                                 const Operation& operation, uint32_t stage, const RoutingCounts& counts,
                                 const TokenPlan& plan) {
    const auto& c = args.common;
    int num_targets = 0;
    CROSSDOCK_ROLLED
    for (uint32_t base = 0; has_choices_from(c, base); base += kLanes) {
        const uint32_t k = base + static_cast<uint32_t>(ctx.lane());
        const bool is_sent = k < c.topk && plan.ranks[k] >= 0;
        const int same_expert = ctx.lanes_before_with(is_sent ? plan.expert_ids[k] : -1);
        const int same_rank = ctx.lanes_before_with(is_sent ? plan.ranks[k] : -1);
        bool is_first = false;
        int position = 0;
        int slot = 0;
        if (is_sent) {
            const int32_t id = plan.expert_ids[k];
            const int rank = plan.ranks[k];
            position = (c.expert_major ? counts.experts[id] : 0) + same_expert;
            slot = counts.ranks[rank];
            is_first = same_rank == 0;
            CROSSDOCK_ROLLED
            for (uint32_t j = 0; j < base; ++j) {
                position += plan.expert_ids[j] == id ? 1 : 0;
                is_first = is_first && plan.ranks[j] != rank;
            }
            CROSSDOCK_ROLLED
            for (uint32_t earlier = 0; earlier < stage; ++earlier) {
                const TokenPlan other = token_plan(ctx, args, shared, earlier);
                bool goes_there = false;
                CROSSDOCK_ROLLED
                for (uint32_t j = 0; j < c.topk; ++j) {
                    position += other.expert_ids[j] == id ? 1 : 0;
                    goes_there = goes_there || other.ranks[j] == rank;
                }
                slot += goes_there ? 1 : 0;
            }
        }
        const int target = num_targets + ctx.warp_count_before(is_first);
        if (k < c.topk && c.expert_major) plan.extras[k] = static_cast<uint32_t>(position);
        if (is_first) {
            const int peer = plan.ranks[k];
            std::byte* row = row_at(c, operation, peer, slot_of(c, c.rank, static_cast<uint32_t>(slot)));
            plan.slots[target] = slot;
            plan.choices[target] = static_cast<int32_t>(k);
            plan.rows[target] = wait_credit(ctx, c, operation, peer) ? row : nullptr;
        }
        num_targets += ctx.warp_count(is_first);
    }
    if (is_leader(ctx)) *plan.num_targets = num_targets;
    ctx.warp_sync();
}

}  // namespace CROSSDOCK_VARIANT
}  // namespace crossdock
