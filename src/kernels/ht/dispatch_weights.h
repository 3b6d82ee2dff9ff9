// SPDX-License-Identifier: Apache-2.0
// High-throughput dispatch: routing weights and expert ids, which travel beside the rows. Packets: weights.h.
#pragma once

#include "kernels/ht/weights.h"

namespace crossdock {
namespace {

// Sends the weights of a chunk of own tokens to one peer.
CROSSDOCK_DEVICE void send_weights(const Ctx& ctx, const HtDispatchArgs& args, const Operation& operation,
                                   uint32_t peer, uint32_t chunk, const Share& share) {
    const HtCommon& c = args.common;
    const uint32_t mask = c.tables.sent_masks[peer * c.tables.chunks + chunk];
    const int32_t experts = static_cast<int32_t>(c.arena.experts_per_rank);
    send_weights(ctx, c, args.weight_slots, operation, peer, chunk - share.first, mask,
                 [&](uint32_t bit, float* weights) {
                     const uint32_t token = chunk * kChunkTokens + bit;
                     if (token >= c.num_tokens) return;
                     WeightWriter writer(weights);
                     CROSSDOCK_ROLLED
                     for (int32_t from = peer * experts;;) {
                         const NextExpert next = NextExpert::of(c, token, from, (peer + 1) * experts);
                         if (next.id < 0) break;
                         writer.add(args.topk_weights[uint64_t{token} * c.topk + next.choice]);
                         from = next.id + 1;
                     }
                     writer.flush();
                 });
}

// One lane. Writes a received row's weights to its slots or, flat, its local experts in ascending order with their
// weights, then -1 and 0.
CROSSDOCK_DEVICE void store_routing(const HtDispatchArgs& args, uint32_t source, uint32_t chunk, uint32_t bit,
                                    uint64_t row, const float* weights) {
    const HtCommon& c = args.common;
    if (!c.expert_major && row >= args.weight_rows) return;
    const uint64_t* bitmap = bitmap_of(c, source, chunk * kChunkTokens + bit);
    const int64_t first_expert =
        args.global_ids ? int64_t{c.rank} * static_cast<int64_t>(c.arena.experts_per_rank) : int64_t{0};
    uint32_t num = 0;
    CROSSDOCK_ROLLED
    for (uint32_t w = 0; w < c.tables.words; ++w) {
        CROSSDOCK_ROLLED
        for (uint64_t bits = bitmap[w]; bits != 0; bits &= bits - 1) {
            const uint32_t expert = 64 * w + lowest_one(bits);
            const float weight = weights != nullptr ? weights[num] : 0.0f;
            if (c.expert_major) {
                const uint32_t slot = slot_of(c, expert, source, chunk, bit);
                if (slot < c.budget && slot < args.weight_rows) args.out_weights[slot] = weight;
            } else {
                args.out_topk_idx[row * c.topk + num] = first_expert + expert;
                args.out_weights[row * c.topk + num] = weight;
            }
            ++num;
        }
    }
    CROSSDOCK_ROLLED
    for (; !c.expert_major && num < c.topk; ++num) {
        args.out_topk_idx[row * c.topk + num] = -1;
        args.out_weights[row * c.topk + num] = 0.0f;
    }
}

CROSSDOCK_DEVICE void receive_weights(const Ctx& ctx, const HtDispatchArgs& args, const Operation& operation,
                                      uint32_t source, uint32_t chunk, const Share& share) {
    const HtCommon& c = args.common;
    const uint32_t entry = source * c.tables.chunks + chunk;
    const uint32_t mask = c.tables.masks[entry];
    receive_weights(ctx, c, args.weight_slots, operation, source, chunk - share.first, mask,
                    [&](uint32_t bit, const float* weights) {
                        const uint32_t row = c.tables.firsts[entry] + ones_below(mask, bit);
                        if (travels(c, row)) store_routing(args, source, chunk, bit, row, weights);
                    });
}

// warp: among the `warps` of this block that exchange weights.
CROSSDOCK_DEVICE void exchange_weights(const Ctx& ctx, const HtDispatchArgs& args, const Operation& operation,
                                       uint32_t warp, uint32_t warps) {
    const HtCommon& c = args.common;
    const uint32_t channel = ctx.block_idx();
    const uint32_t num_ranks = c.arena.num_ranks;
    const Share own = Share::of(num_chunks(c.tables.routing->num_tokens), channel, c.channels);
    const auto send = [&](uint32_t i) {
        const uint32_t peer = (c.rank + i) % num_ranks;
        if (peer_states(ctx, args.shared)[peer] != kAbsent)
            send_weights(ctx, args, operation, peer, own.first + i / num_ranks, own);
    };
    const auto receive = [&](uint32_t i) {
        const uint32_t source = (c.rank + num_ranks - i % num_ranks) % num_ranks;
        const Share share = chunk_share(c, source, channel);
        if (i / num_ranks < share.size())
            receive_weights(ctx, args, operation, source, share.first + i / num_ranks, share);
    };
    share_weights(warp, warps, {own.size(), num_ranks}, {largest_share(c, channel, chunk_share), num_ranks}, send,
                  receive);
}

}  // namespace
}  // namespace crossdock
