// SPDX-License-Identifier: Apache-2.0
// Dispatch, send half: how many rows and choices go where. Every block counts the tokens before its own, which gives
// its rows' slots; the last block counts all tokens, and announces the counts to the ranks.
#pragma once

#include "kernels/ll/elastic_dispatch.h"
#include "kernels/ll/gin_peers.h"
#include "kernels/ll/ll128.h"

namespace crossdock {
namespace {

// A block's counts of its rank's routing, in shared memory.
struct RoutingCounts {
    uint32_t* experts;  // [experts] choices
    uint32_t* ranks;    // [ranks] rows
};

// Counts tokens [begin, end), one per thread, if the ranks do not fit into a mask.
CROSSDOCK_DEVICE_RARE void count_tokens_of_many_ranks(const Ctx& ctx, const auto& c, uint32_t begin, uint32_t end,
                                                      RoutingCounts counts) {
    for_threads(ctx, end - begin, [&](uint32_t i) {
        const uint32_t token = begin + i;
        CROSSDOCK_ROLLED
        for (uint32_t k = 0; k < c.topk; ++k) {
            const uint32_t id = expert_id(c, token, k);
            if (id == kDropped) continue;
            if (c.expert_major) ctx.add_shared(counts.experts + id, 1);
            const uint32_t rank = rank_of_expert(c, id);
            if (is_first_of_rank(c, token, k, rank)) ctx.add_shared(counts.ranks + rank, 1);
        }
    });
}

// A lane writes or reads the counts of so many experts at once.
inline constexpr uint32_t kExpertsAtOnce = kLanes > 1 ? 8 : 1;

// The experts of some of a token's choices.
struct TokenIds {
    static constexpr uint32_t kMost = 8;
    uint32_t ids[kMost];
};
// Choices as the caller passed them. Nothing waits for their loads until they are used.
struct GivenIds {
    int64_t ids[TokenIds::kMost] = {};
    uint32_t num = 0;  // the choices from here on, of which `ids` has the first ones
};
template <typename Op>
class RoutingCounter {
  public:
    CROSSDOCK_DEVICE explicit RoutingCounter(const Op& op)
        : op_(op), ctx_(op.ctx), args_(op.args), c_(op.c), shared_(op.args.shared) {}

    CROSSDOCK_DEVICE RoutingCounts counts() const {
        return {shared_.expert_counts.in(ctx_.shared_memory()), shared_.rank_counts.in(ctx_.shared_memory())};
    }
    // With several LSA teams, [ranks + 1] of each: this rank's rows for the ranks below, and their choices.
    CROSSDOCK_DEVICE uint32_t* first_rows() const { return counts().ranks + c_.arena.num_ranks; }
    CROSSDOCK_DEVICE uint32_t* first_choices() const { return first_rows() + c_.arena.num_ranks + 1; }
    // Followed by a block barrier.
    CROSSDOCK_DEVICE void clear() const {
        for_threads(ctx_, c_.arena.num_experts, [&](uint32_t i) { counts().experts[i] = 0; });
        for_threads(ctx_, c_.arena.num_ranks, [&](uint32_t i) { counts().ranks[i] = 0; });
    }
    // Choices [base, base + kMost) of a token, if it is below `end`.
    CROSSDOCK_DEVICE GivenIds load_ids(uint32_t token, uint32_t end, uint32_t base) const {
        GivenIds given;
        given.num = token < end ? c_.topk - base : 0;
        if (given.num > 0) {
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < TokenIds::kMost; ++i)
                given.ids[i] = given_id(c_, token, i < given.num ? base + i : base);
        }
        return given;
    }
    CROSSDOCK_DEVICE TokenIds experts_of(const GivenIds& given) const {
        TokenIds loaded;
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < TokenIds::kMost; ++i)
            loaded.ids[i] = i < given.num ? expert_of(c_, given.ids[i]) : kDropped;
        return loaded;
    }
    // Counts tokens [begin, end), one per lane. first: the choices of this thread's first token. Followed by a block
    // barrier.
    CROSSDOCK_DEVICE void count(uint32_t begin, uint32_t end, TokenIds first) const {
        constexpr uint32_t kRanksInMask = 64;  // bits of `ranks`
        const RoutingCounts counted = counts();
        if (c_.arena.num_ranks > kRanksInMask) return count_tokens_of_many_ranks(ctx_, c_, begin, end, counted);
        const uint32_t threads = op_.threads();
        CROSSDOCK_ROLLED
        for (uint32_t warp_token = begin + op_.warp() * kLanes; warp_token < end; warp_token += threads) {
            const uint32_t token = warp_token + op_.lane();
            uint64_t ranks = 0;
            CROSSDOCK_ROLLED
            for (uint32_t base = 0;;) {
                CROSSDOCK_UNROLL
                for (uint32_t i = 0; i < TokenIds::kMost; ++i) {
                    if (first.ids[i] == kDropped) continue;
                    ranks |= uint64_t{1} << rank_of_expert(c_, first.ids[i]);
                    if (counts_experts() && (!is_elastic(args_) || is_counted(op_, token, base, i, first.ids)))
                        ctx_.add_shared(counted.experts + first.ids[i], 1);
                }
                base += TokenIds::kMost;
                if (!has_choices_from(c_, base)) break;
                first = experts_of(load_ids(token, end, base));
            }
            CROSSDOCK_ROLLED
            for (uint32_t rank = 0; rank < c_.arena.num_ranks; ++rank) {
                const uint32_t rows = ctx_.warp_count((ranks >> rank & 1) != 0);
                if (is_leader(ctx_) && rows > 0) ctx_.add_shared(counted.ranks + rank, rows);
            }
            if (c_.kFewTokens) break;
            first = experts_of(load_ids(token + threads, end, 0));
        }
    }

    // All threads. Counts all tokens to find first_rows and first_choices, then clears the counts.
    CROSSDOCK_DEVICE void find_cells() const {
        if constexpr (!kHasGinPeers) return;
        const RoutingCounts counted = counts();
        const uint32_t experts = c_.expert_major ? c_.offsets.experts_per_rank : 0;
        count(0, c_.num_tokens, experts_of(load_ids(op_.thread(), c_.num_tokens, 0)));
        ctx_.block_sync();
        for_threads(ctx_, c_.arena.num_ranks, [&](uint32_t rank) {
            uint32_t choices = 0;
            CROSSDOCK_ROLLED
            for (uint32_t i = 0; i < experts; ++i) choices += counted.experts[rank * experts + i];
            first_rows()[1 + rank] = counted.ranks[rank];
            first_choices()[1 + rank] = choices;
        });
        ctx_.block_sync();
        for_threads(ctx_, 2, [&](uint32_t i) {
            uint32_t* first = i == 0 ? first_rows() : first_choices();
            first[0] = 0;
            CROSSDOCK_ROLLED
            for (uint32_t rank = 0; rank < c_.arena.num_ranks; ++rank) first[rank + 1] += first[rank];
        });
        clear();
        ctx_.block_sync();
    }

    // The last block tells every peer how many rows, and choices of each of its experts, this source sends it. The
    // counts are sent before the rows, so that the receiver knows every row's final place before the first row lands.
    // Every word carries its epoch, so the words need no order.
    CROSSDOCK_DEVICE void announce() const {
        const RoutingCounts counted = counts();
        const uint32_t experts = c_.offsets.experts_per_rank;
        const uint64_t form = op_.own_rows_are_ll128() ? kLl128Rows : 0;
        CROSSDOCK_ROLLED
        for (uint32_t peer = op_.warp(); peer < c_.arena.num_ranks; peer += op_.warps()) {
            if (!op_.wait_credit_as_warp(peer)) continue;
            uint64_t* words = op_.is_gin_peer(peer)
                                  ? reinterpret_cast<uint64_t*>(in_outbox(c_, outbox_counts(c_, peer)))
                                  : op_.counts(peer, c_.rank);
            const auto store = [&](uint32_t i, uint64_t count) {
                ctx_.store_relaxed_system(words + i, pack_word(op_.epoch, count));
            };
            if (is_leader(ctx_)) store(0, form | counted.ranks[peer]);
            if (!counts_experts()) continue;
            const uint32_t* of_experts = counted.experts + peer * experts;
            CROSSDOCK_ROLLED
            for (uint32_t first = op_.lane(); first < experts; first += kExpertsAtOnce * kLanes) {
                uint32_t choices[kExpertsAtOnce];
                CROSSDOCK_UNROLL
                for (uint32_t i = 0; i < kExpertsAtOnce; ++i) {
                    if (first + i * kLanes < experts) choices[i] = of_experts[first + i * kLanes];
                }
                CROSSDOCK_UNROLL
                for (uint32_t i = 0; i < kExpertsAtOnce; ++i) {
                    if (first + i * kLanes < experts) store(1 + first + i * kLanes, choices[i]);
                }
            }
        }
        if (ctx_.num_blocks() > 1) return;
        // The only block also sends, and counts again for its own tokens.
        ctx_.block_sync();
        clear();
        ctx_.block_sync();
    }

  private:
    // Rank-major, only the counts that are announced are by expert, too, and only of elastic dispatches.
    CROSSDOCK_DEVICE bool counts_experts() const {
        return c_.expert_major || (is_elastic(args_) && ctx_.block_idx() == ctx_.num_blocks() - 1);
    }

    const Op& op_;
    const Ctx& ctx_;
    decltype(Op::args) args_;
    decltype(Op::c) c_;
    const LlDispatchShared& shared_;
};

}  // namespace
}  // namespace crossdock
