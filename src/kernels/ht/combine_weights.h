// SPDX-License-Identifier: Apache-2.0
// High-throughput combine: the gradients of routing weights, which return beside the rows. Packets: weights.h.
#pragma once

#include "kernels/ht/weights.h"

namespace crossdock {
namespace {

// The gradients of a chunk's weights return to its tokens' source rank.
CROSSDOCK_DEVICE void return_weights(const Ctx& ctx, const HtCombineArgs& args, const Operation& operation,
                                     uint32_t source, uint32_t chunk, const Share& share) {
    const HtCommon& c = args.common;
    const uint32_t entry = source * c.tables.chunks + chunk;
    const uint32_t mask = c.tables.masks[entry];
    send_weights(ctx, c, args.weight_slots, operation, source, chunk - share.first, mask,
                 [&](uint32_t bit, float* weights) {
                     const uint64_t* bitmap = bitmap_of(c, source, chunk * kChunkTokens + bit);
                     const uint64_t row = c.tables.firsts[entry] + ones_below(mask, bit);
                     WeightWriter writer(weights);
                     uint32_t num = 0;
                     CROSSDOCK_ROLLED
                     for (uint32_t w = 0; w < c.tables.words; ++w) {
                         CROSSDOCK_ROLLED
                         for (uint64_t bits = bitmap[w]; bits != 0; bits &= bits - 1, ++num) {
                             const uint64_t at =
                                 c.expert_major ? slot_of(c, 64 * w + lowest_one(bits), source, chunk, bit) : row;
                             const bool is_here = at < c.budget && at < args.token_rows;
                             writer.add(!is_here ? 0.0f : args.weights[c.expert_major ? at : at * c.topk + num]);
                         }
                     }
                     writer.flush();
                 });
}

// The gradients of a chunk's weights, from all of its ranks; 0 if no rank sends one. One warp.
CROSSDOCK_DEVICE void collect_weights(const Ctx& ctx, const HtCombineArgs& args, const Operation& operation,
                                      uint32_t chunk, const Share& share) {
    const HtCommon& c = args.common;
    const uint32_t first = chunk * kChunkTokens;
    const uint32_t tokens = c.num_tokens > first ? c.num_tokens - first : 0;
    const uint32_t num = (tokens < kChunkTokens ? tokens : kChunkTokens) * c.topk;
    float* out = args.out_weights + uint64_t{first} * c.topk;
    CROSSDOCK_ROLLED
    for (uint32_t i = ctx.lane(); i < num; i += kLanes) out[i] = 0.0f;
    ctx.warp_sync();
    const int32_t experts = static_cast<int32_t>(c.arena.experts_per_rank);
    CROSSDOCK_ROLLED
    for (uint32_t peer = 0; peer < c.arena.num_ranks; ++peer) {
        const uint32_t mask = c.tables.sent_masks[peer * c.tables.chunks + chunk];
        if (peer_states(ctx, args.shared)[peer] == kAbsent) continue;
        receive_weights(ctx, c, args.weight_slots, operation, peer, chunk - share.first, mask,
                        [&](uint32_t bit, const float* weights) {
                            if (weights == nullptr || bit >= tokens) return;
                            const int32_t* ids = c.tables.ids + uint64_t{first + bit} * c.topk;
                            const int32_t end = static_cast<int32_t>(peer + 1) * experts;
                            uint32_t at = 0;
                            CROSSDOCK_ROLLED
                            for (int32_t from = static_cast<int32_t>(peer) * experts;; ++at) {
                                const NextExpert next = NextExpert::of(c, first + bit, from, end);
                                if (next.id < 0) return;
                                CROSSDOCK_ROLLED
                                for (uint32_t k = 0; k < c.topk; ++k) {
                                    if (ids[k] == next.id) out[bit * c.topk + k] = weights[at];
                                }
                                from = next.id + 1;
                            }
                        });
    }
}

// warp: among the `warps` of this block that exchange weights.
CROSSDOCK_DEVICE void exchange_gradients(const Ctx& ctx, const HtCombineArgs& args, const Operation& operation,
                                         uint32_t warp, uint32_t warps) {
    const HtCommon& c = args.common;
    const uint32_t channel = ctx.block_idx();
    const uint32_t num_ranks = c.arena.num_ranks;
    const Share own = Share::of(num_chunks(c.tables.routing->num_tokens), channel, c.channels);
    const auto send = [&](uint32_t i) {
        const uint32_t source = (c.rank + i) % num_ranks;
        const Share share = chunk_share(c, source, channel);
        if (i / num_ranks < share.size() && peer_states(ctx, args.shared)[source] != kAbsent)
            return_weights(ctx, args, operation, source, share.first + i / num_ranks, share);
    };
    // All gradients of a chunk are written at once: 0 if no rank sends one.
    const auto receive = [&](uint32_t chunk) { collect_weights(ctx, args, operation, own.first + chunk, own); };
    share_weights(warp, warps, {largest_share(c, channel, chunk_share), num_ranks}, {own.size(), 1}, send, receive);
}

}  // namespace
}  // namespace crossdock
