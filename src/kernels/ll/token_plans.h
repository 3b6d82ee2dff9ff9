// SPDX-License-Identifier: Apache-2.0
// Dispatch, send half: where a token goes, its rows' headers, and what a later combine needs of its choices. A warp
// plans the token in its stage; others read that plan if rows are LL128 rows or stay.
#pragma once

#include "kernels/ll/routing_counts.h"

namespace crossdock {
namespace {

struct GivenChoice {
    int64_t id = 0;
    float weight = 0.0f;  // rank-major and elastic
};

// Tokens [first, first + num) that are being sent, one per stage, and the part of their rows.
struct Batch {
    uint32_t first;
    uint32_t num;
    uint32_t row_first;  // bytes [row_first, row_first + chunk) of the rows
    uint32_t chunk;
    bool is_last_chunk;
};

// The row of a token for one of its ranks.
struct SendTask {
    uint32_t token;
    uint32_t stage;
    uint32_t target;  // of the token's
    uint32_t peer;
    uint32_t row_idx;  // among this source's rows there
    uint32_t slot;
    std::byte* row;  // null: the peer is lost, or it is this rank and the row stays
};

template <typename Op>
class TokenPlanner {
  public:
    CROSSDOCK_DEVICE explicit TokenPlanner(const Op& op)
        : op_(op), ctx_(op.ctx), args_(op.args), c_(op.c), shared_(op.args.shared), counter_(op) {}

    // Rows for this rank stay in their stages, and the receive half finds their places.
    CROSSDOCK_DEVICE bool own_rows_stay() const {
        return op_.sends() && op_.receives() && !op_.own_rows_are_ll128() && args_.own_rows_stay;
    }
    // Rank-major places follow from the slots, so the send half already stores these rows.
    CROSSDOCK_DEVICE bool own_rows_are_placed() const {
        return own_rows_stay() && !c_.expert_major && !is_elastic(args_);
    }
    CROSSDOCK_DEVICE TokenPlan plan_of(uint32_t stage) const {
        std::byte* plans = shared_.plans.in(ctx_.shared_memory());
        return view_of<TokenPlan>(plans + view_bytes<TokenPlan>(c_.topk) * stage, c_.topk);
    }

    // A warp plans the token in its stage. First, before a block barrier, it loads the token's routing.
    CROSSDOCK_DEVICE GivenChoice load_choice(const Batch& batch, uint32_t k) const {
        const uint32_t token = batch.first + op_.warp();
        if (op_.warp() >= batch.num || k >= c_.topk) return {};
        const bool has_weight = is_elastic(args_) ? args_.elastic.with_weights : !c_.expert_major;
        return {given_id(c_, token, k), has_weight ? args_.topk_weights[uint64_t{token} * c_.topk + k] : 0.0f};
    }
    // first: this lane's first choice, loaded by load_choice.
    CROSSDOCK_DEVICE void write(const Batch& batch, GivenChoice first) const {
        if (op_.warp() >= batch.num) return;
        const TokenPlan own = plan_of(op_.warp());
        for_lanes(ctx_, c_.topk, [&](uint32_t k) {
            const GivenChoice choice = k == op_.lane() ? first : load_choice(batch, k);
            own.expert_ids[k] = expert_of(c_, choice.id);
            if (is_elastic(args_) && args_.elastic.topk_idx_copy != nullptr)
                copy_id(op_, batch.first + op_.warp(), k, choice.id);
            own.ranks[k] = rank_of_expert(c_, own.expert_ids[k]);
            if (!c_.expert_major || is_elastic(args_)) own.weights[k] = bits_of(choice.weight);
        });
        ctx_.warp_sync();
    }
    // Then it finds the slots: counts cover the tokens before the batch; those in earlier stages are counted here.
    CROSSDOCK_DEVICE void make(const Batch& batch) const {
        const uint32_t own_stage = op_.warp();
        if (own_stage >= batch.num) return;
        const TokenPlan own = plan_of(own_stage);
        const RoutingCounts counted = counter_.counts();
        uint32_t num_targets = 0;
        bool has_repeats = false;
        if (is_leader(ctx_)) *own.own_target = kDropped;
        ctx_.warp_sync();
        CROSSDOCK_ROLLED
        for (uint32_t base = 0; has_choices_from(c_, base); base += kLanes) {
            const uint32_t k = base + op_.lane();
            const bool is_sent = k < c_.topk && own.ranks[k] != kDropped;
            const uint32_t id = is_sent ? own.expert_ids[k] : kDropped;
            const uint32_t rank = is_sent ? own.ranks[k] : kDropped;
            const uint32_t same_expert = ctx_.lanes_before_with(id);
            const uint32_t same_rank = ctx_.lanes_before_with(rank);
            Before before{0, 0, false, same_expert > 0};
            if (is_sent) {
                before.choices = (c_.expert_major ? counted.experts[id] : 0) + (is_elastic(args_) ? 0 : same_expert);
                before.rows = counted.ranks[rank];
                before.is_first = same_rank == 0;
                add_own_choices(own, base, id, rank, before);
                add_earlier_stages(own_stage, id, rank, before);
            }
            const uint32_t target = num_targets + ctx_.warp_count_before(before.is_first);
            if (k < c_.topk && c_.expert_major)
                own.numbers[k] = before.choices | (is_elastic(args_) && before.repeats ? 1u << kRepeatsShift : 0);
            has_repeats = has_repeats || (is_sent && before.repeats);
            if (before.is_first) {
                std::byte* row = place_of(rank, before.rows);
                own.row_idx[target] = before.rows;
                own.choices[target] = k;
                const bool stays = own_rows_stay() && rank == c_.rank;
                if (stays) *own.own_target = target;
                own.rows[target] = !stays && op_.wait_credit(rank) ? row : nullptr;
            }
            num_targets += ctx_.warp_count(before.is_first);
        }
        if (is_leader(ctx_)) *own.num_targets = num_targets;
        ctx_.warp_sync();
        if (is_elastic(args_) && c_.expert_major && ctx_.warp_any(has_repeats)) add_up_weights(op_, own);
    }
    // One warp. Keeps a token's choices, and marks those on other ranks for a later combine; the receive half fills in
    // this rank's own rows. Not needed in rank-major, where ids cannot change between dispatch and combine
    // (crossdockHandleRebind).
    CROSSDOCK_DEVICE void keep_choices(const Batch& batch, uint32_t stage) const {
        if (!c_.expert_major || is_elastic(args_)) return;
        const TokenPlan of_token = plan_of(stage);
        for_lanes(ctx_, c_.topk, [&](uint32_t k) {
            *dispatched_id(c_, batch.first + stage, k) = static_cast<int32_t>(of_token.expert_ids[k]);
            if (of_token.ranks[k] != c_.rank) *own_row(c_, batch.first + stage, k) = kOtherRank;
        });
    }

    // With several LSA teams. One warp. Keeps where a token's rows return.
    CROSSDOCK_DEVICE void keep_cells(const Batch& batch, uint32_t stage) const {
        if constexpr (!kHasGinPeers) return;
        const TokenPlan of_token = plan_of(stage);
        const uint32_t targets = *of_token.num_targets;
        CROSSDOCK_ROLLED
        for (uint32_t target = 0; target < targets; ++target) {
            const SendTask task = task_of(batch, of_token, stage, target);
            const ReturnCells first = cells_of(task, choices_before(stage, task.peer));
            if (is_leader(ctx_)) *returned_cell(c_, false, task.token, target) = first.row;
            uint32_t choices = 0;
            CROSSDOCK_ROLLED
            for (uint32_t base = 0; c_.expert_major && has_choices_from(c_, base); base += kLanes) {
                const uint32_t k = base + op_.lane();
                const bool is_there = k < c_.topk && of_token.ranks[k] == task.peer;
                const uint32_t cell = first.choice + choices + ctx_.warp_count_before(is_there);
                if (is_there) *returned_cell(c_, true, task.token, k) = cell;
                choices += ctx_.warp_count(is_there);
            }
        }
        ctx_.warp_sync();
    }

    CROSSDOCK_DEVICE SendTask task_of(const Batch& batch, const TokenPlan& of_token, uint32_t stage,
                                      uint32_t target) const {
        const uint32_t row_idx = of_token.row_idx[target];
        return {batch.first + stage,
                stage,
                target,
                of_token.ranks[of_token.choices[target]],
                row_idx,
                slot_of(c_, c_.rank, row_idx),
                of_token.rows[target]};
    }

    // Word i of a row's header: 0 is its origin, the others are choices; the last one, with several LSA teams,
    // ReturnCells.
    CROSSDOCK_DEVICE uint64_t header_word(const SendTask& task, uint32_t direct, uint32_t first_choice,
                                          uint32_t i) const {
        if (i == 0) return RowOrigin{task.token, task.target, direct, first_choice}.payload();
        if (kHasGinPeers && i > c_.topk) return cells_of(task, first_choice).payload();
        const TokenPlan of_token = plan_of(task.stage);
        const uint32_t k = i - 1;
        const uint32_t id = of_token.expert_ids[k];
        if (is_elastic(args_)) {
            const uint32_t number = c_.expert_major ? of_token.numbers[k] : 0;
            return ElasticChoice{id == kDropped ? ElasticChoice::kNoExpert : id, number & ElasticChoice::kMostTokens,
                                 number >> kRepeatsShift != 0, of_token.weights[k]}
                .payload();
        }
        return uint64_t{c_.expert_major ? of_token.numbers[k] : of_token.weights[k]} << 32 | id;
    }
    // One warp. Sends a row's token and choices.
    CROSSDOCK_DEVICE void send_header(const SendTask& task, uint32_t direct) const {
        TaggedWord* words = op_.is_gin_peer(task.peer) ? reinterpret_cast<TaggedWord*>(task.row - op_.row_front())
                                                       : op_.header(task.peer, task.slot);
        const uint64_t tag = pack_word(op_.epoch, 0);
        const uint32_t first_choice = choices_before(task.stage, task.peer);
        for_lanes(ctx_, header_words(c_),
                  [&](uint32_t i) { ctx_.store_tagged(words + i, header_word(task, direct, first_choice, i), tag); });
    }

    // One warp. The number of choices on a rank of the tokens before the one in `stage`; 0 in rank-major and elastic.
    CROSSDOCK_DEVICE uint32_t choices_before(uint32_t stage, uint32_t rank) const {
        if (!c_.expert_major || is_elastic(args_)) return 0;
        const uint32_t experts = c_.offsets.experts_per_rank;
        const uint32_t* of_rank = counter_.counts().experts + rank * experts;
        int choices = 0;
        for_lanes(ctx_, experts, [&](uint32_t i) { choices += of_rank[i]; });
        CROSSDOCK_ROLLED
        for (uint32_t earlier = 0; earlier < stage; ++earlier) {
            const uint32_t* ranks = plan_of(earlier).ranks;
            for_lanes(ctx_, c_.topk, [&](uint32_t k) { choices += ranks[k] == rank; });
        }
        return ctx_.warp_sum(choices);
    }

  private:
    // Row i for the rank: its slot there or, for a GIN peer, its place in the outbox.
    CROSSDOCK_DEVICE std::byte* place_of(uint32_t rank, uint32_t i) const {
        if (!op_.is_gin_peer(rank)) return op_.row(rank, slot_of(c_, c_.rank, i));
        return in_outbox(c_, outbox_row(op_, counter_.first_rows()[rank] + i)) + op_.row_front();
    }
    CROSSDOCK_DEVICE ReturnCells cells_of(const SendTask& task, uint32_t first_choice) const {
        return {counter_.first_rows()[task.peer] + task.row_idx, counter_.first_choices()[task.peer] + first_choice};
    }
    // What comes before a choice, in the order (token, k) of this source.
    struct Before {
        uint32_t choices;  // of the same expert
        uint32_t rows;     // for the same rank
        bool is_first;     // of this token's choices on the rank
        bool repeats;      // an earlier choice of this token has the expert
    };
    // Choices [0, end) of the same token.
    CROSSDOCK_DEVICE void add_own_choices(const TokenPlan& own, uint32_t end, uint32_t id, uint32_t rank,
                                          Before& before) const {
        CROSSDOCK_ROLLED
        for (uint32_t j = 0; j < end; ++j) {
            const bool is_same = own.expert_ids[j] == id;
            before.repeats = before.repeats || is_same;
            before.choices += is_same && !is_elastic(args_) ? 1 : 0;
            before.is_first = before.is_first && own.ranks[j] != rank;
        }
    }
    // The tokens in stages [0, end).
    CROSSDOCK_DEVICE void add_earlier_stages(uint32_t end, uint32_t id, uint32_t rank, Before& before) const {
        CROSSDOCK_ROLLED
        for (uint32_t earlier = 0; earlier < end; ++earlier) {
            const TokenPlan other = plan_of(earlier);
            bool goes_there = false;
            uint32_t choices = 0;
            CROSSDOCK_ROLLED
            for (uint32_t j = 0; j < c_.topk; ++j) {
                choices += other.expert_ids[j] == id ? 1 : 0;
                goes_there = goes_there || other.ranks[j] == rank;
            }
            before.choices += is_elastic(args_) && choices > 1 ? 1 : choices;
            before.rows += goes_there ? 1 : 0;
        }
    }

    const Op& op_;
    const Ctx& ctx_;
    decltype(Op::args) args_;
    decltype(Op::c) c_;
    const LlDispatchShared& shared_;
    RoutingCounter<Op> counter_;
};

}  // namespace
}  // namespace crossdock
