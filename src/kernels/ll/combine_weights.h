// SPDX-License-Identifier: Apache-2.0
// Combine: routing weights. Whoever sums rows before sending them needs the weights of their tokens; elastic combines
// return the weights of received rows.
#pragma once

#include "kernels/ll/gin_peers.h"
#include "kernels/ll/operation.h"

namespace crossdock {
namespace {

template <typename Op>
class CombineWeights {
  public:
    CROSSDOCK_DEVICE explicit CombineWeights(const Op& op) : op_(op), ctx_(op.ctx), args_(op.args), c_(op.c) {}

    // Sends this rank's weights to the ranks that weight and sum before they send. One warp per token.
    CROSSDOCK_DEVICE void announce() const {
        const uint32_t warps = op_.blocks() * op_.warps();
        CROSSDOCK_ROLLED
        for (uint32_t token = op_.warp() * op_.blocks() + op_.block(); token < c_.num_tokens; token += warps) {
            CROSSDOCK_ROLLED
            for (uint32_t k = 0; k < c_.topk; ++k) {
                const uint32_t peer = rank_of_expert(c_, expert_id(c_, token, k));
                if (peer == kDropped || op_.is_gin_peer(peer) || !is_first_of_rank(c_, token, k, peer)) continue;
                if (op_.wait_credit_as_warp(peer)) write_weights(token, op_.weights(peer, c_.rank, token));
            }
        }
    }
    // The same for GIN peers: the first block puts all tokens' weights to each rank that has any of the tokens.
    CROSSDOCK_DEVICE void put_all() const {
        if constexpr (!kHasGinPeers) return;
        if (ctx_.block_idx() != 0) return;
        uint32_t* has_tokens = args_.shared.gin_ranks.in(ctx_.shared_memory());
        for_threads(ctx_, c_.arena.num_ranks, [&](uint32_t rank) { has_tokens[rank] = 0; });
        ctx_.block_sync();
        for_threads(ctx_, c_.num_tokens * c_.topk, [&](uint32_t i) {
            const uint32_t rank = rank_of_expert(c_, expert_id(c_, 0, i));
            if (rank != kDropped) ctx_.add_shared(has_tokens + rank, 1);
        });
        CROSSDOCK_ROLLED
        for (uint32_t token = op_.warp(); token < c_.num_tokens; token += op_.warps()) {
            std::byte* words = in_outbox(c_, c_.outbox.weights.offset + uint64_t{token} * c_.offsets.weight_stride);
            write_weights(token, reinterpret_cast<TaggedWord*>(words));
        }
        ctx_.fence_system();
        ctx_.block_sync();
        for_threads(ctx_, c_.arena.num_ranks, [&](uint32_t rank) {
            if (has_tokens[rank] == 0 || !op_.is_gin_peer(rank) || !op_.wait_credit(rank)) return;
            put_and_raise(ctx_, c_.reach, rank, op_.weights_offset(c_.rank, 0), c_.outbox.weights.offset,
                          uint64_t{c_.num_tokens} * c_.offsets.weight_stride,
                          raise_to_epoch(op_, Signal::kWeights, rank));
        });
    }
    // Elastic. Returns the weights of received rows, in the place where other operations get those of this rank's own
    // tokens. One warp per row.
    CROSSDOCK_DEVICE void give_back() const {
        const uint32_t warps = op_.blocks() * op_.warps();
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < c_.arena.num_ranks; ++i) {
            const uint32_t source = (c_.rank + i) % c_.arena.num_ranks;
            const LlReceived received = *received_from(c_, source);
            const uint32_t rows = received.rows < c_.arena.max_tokens ? received.rows : c_.arena.max_tokens;
            CROSSDOCK_ROLLED
            for (uint32_t row = op_.warp() * op_.blocks() + op_.block(); row < rows; row += warps) {
                const RowRecord* record = row_record(c_, source, row);
                const uint32_t token = record->token_idx;
                if (!op_.wait_credit_as_warp(source, token < c_.arena.max_tokens)) continue;
                const int32_t* places = reinterpret_cast<const int32_t*>(record + 1);
                TaggedWord* words = op_.weights(source, c_.rank, token);
                for_lanes(ctx_, (c_.topk + 1) / 2, [&](uint32_t pair) {
                    const uint64_t lower = returned_weight(received.first_row + row, places, 2 * pair);
                    const uint64_t upper = returned_weight(received.first_row + row, places, 2 * pair + 1);
                    ctx_.store_tagged(words + pair, upper << 32 | lower, pack_word(op_.epoch, 0));
                });
            }
        }
    }
    // Elastic, receive half: the weights of this rank's tokens.
    CROSSDOCK_DEVICE void receive(const WorkShare& share) const {
        CROSSDOCK_ROLLED
        for (uint32_t token = share.first(ctx_); token < c_.num_tokens; token += share.step()) {
            for_lanes(ctx_, c_.topk, [&](uint32_t k) {
                const uint32_t rank = rank_of_expert(c_, expert_id(c_, token, k));
                uint64_t pair = 0;
                if (rank != kDropped)
                    op_.wait_tagged(WaitStep::kWeights, rank, op_.weights(c_.rank, rank, token) + k / 2, pair);
                args_.elastic.out_weights[uint64_t{token} * c_.topk + k] =
                    float_of(static_cast<uint32_t>(pair >> (32 * (k % 2))));
            });
        }
        ctx_.warp_sync();
    }

  private:
    // One warp. Writes a token's weights.
    CROSSDOCK_DEVICE void write_weights(uint32_t token, TaggedWord* words) const {
        const uint32_t topk = c_.topk;
        const float* weights = args_.topk_weights + uint64_t{token} * topk;
        for_lanes(ctx_, (topk + 1) / 2, [&](uint32_t i) {
            const uint32_t upper = 2 * i + 1 < topk ? bits_of(weights[2 * i + 1]) : 0;
            ctx_.store_tagged(words + i, uint64_t{upper} << 32 | bits_of(weights[2 * i]), pack_word(op_.epoch, 0));
        });
    }
    // The bits of choice k's weight, 0 if its expert is not here. number: of the row among all received ones.
    CROSSDOCK_DEVICE uint32_t returned_weight(uint32_t number, const int32_t* places, uint32_t k) const {
        if (k >= c_.topk || places[k] == -1) return 0;
        const uint32_t row =
            c_.expert_major ? static_cast<uint32_t>(places[k] >= 0 ? places[k] : -2 - places[k]) : number;
        if (row >= args_.elastic.rows) return 0;
        return bits_of(args_.elastic.weights[c_.expert_major ? row : uint64_t{row} * c_.topk + k]);
    }

    const Op& op_;
    const Ctx& ctx_;
    decltype(Op::args) args_;
    decltype(Op::c) c_;
};

}  // namespace
}  // namespace crossdock
