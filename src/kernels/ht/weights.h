// SPDX-License-Identifier: Apache-2.0
// Routing weights are sent in chunks of tokens: by dispatch to the ranks of the experts, and their gradients back by
// combine. A packet has, for each row of the chunk, the weights of the receiving (or returning) rank's experts in
// ascending order. One lane per token. Every chunk has a packet for every rank, even if empty: a later packet waits for
// the credit of the packet that used its slot before.
#pragma once

#include "kernels/ht/operation.h"

namespace crossdock {
namespace {

// Appends weights to a packet, four at a time.
class WeightWriter {
  public:
    CROSSDOCK_DEVICE explicit WeightWriter(float* target) : target_(reinterpret_cast<Bytes16*>(target)) {}

    CROSSDOCK_DEVICE void add(float weight) {
        const uint64_t bits = uint64_t{bits_of(weight)} << (32 * (num_ % 2));
        (num_ < 2 ? four_.low : four_.high) |= bits;
        if (++num_ == 4) flush();
    }
    CROSSDOCK_DEVICE void flush() {
        if (num_ > 0) *target_++ = four_;
        four_ = {};
        num_ = 0;
    }

  private:
    Bytes16* target_;
    Bytes16 four_{};
    uint32_t num_ = 0;
};

// The next of an own token's experts from a global id on and below `end`, and the last choice of it; -1: none.
struct NextExpert {
    int32_t id;
    uint32_t choice;

    CROSSDOCK_DEVICE static NextExpert of(const HtCommon& c, uint32_t token, int32_t from, int32_t end) {
        const int32_t* ids = c.tables.ids + uint64_t{token} * c.topk;
        NextExpert next{end, 0};
        CROSSDOCK_ROLLED
        for (uint32_t k = 0; k < c.topk; ++k) {
            const int32_t id = ids[k];
            if (id >= from && id < end && id <= next.id) next = {id, k};
        }
        return next.id < end ? next : NextExpert{-1, 0};
    }
};

// One warp. Sends packet `number` to a peer: fill(bit, weights), one lane per token of the mask.
template <typename Fill>
CROSSDOCK_DEVICE void send_weights(const Ctx& ctx, const HtCommon& c, const HtSlots& slots, const Operation& operation,
                                   uint32_t peer, uint32_t number, uint32_t mask, Fill fill) {
    const uint32_t channel = ctx.block_idx();
    const bool is_remote_peer = is_remote(c.reach, peer);
    const GinRing gin_ring = GinRing::of_weights(c, peer, channel);
    const LsaRing ring = LsaRing::weights_to(c, peer, channel);
    bool may_send = false;
    if (is_leader(ctx)) {
        may_send = is_remote_peer ? gin_ring.wait_credit(ctx, operation, slots, number)
                                  : ring.wait_credit(ctx, operation, slots, number);
    }
    if (ctx.warp_broadcast(may_send ? 1u : 0u) == 0) return;
    float* weights =
        reinterpret_cast<float*>(is_remote_peer ? gin_ring.outgoing(slots, number) : ring.packet(slots, number));
    const uint32_t per_row = weights_per_row(c.topk, c.arena.experts_per_rank);
    CROSSDOCK_ROLLED
    for (uint32_t bit = ctx.lane(); bit < kChunkTokens; bit += kLanes) {
        if ((mask >> bit & 1) != 0) fill(bit, weights + ones_below(mask, bit) * per_row);
    }
    ctx.warp_sync();
    if (is_leader(ctx)) {
        if (is_remote_peer) {
            gin_ring.send(ctx, operation, slots, number, 4 * per_row * number_of_ones(mask));
        } else {
            ring.release_flag(ctx, operation, slots, number);
        }
    }
    ctx.warp_sync();
}

// One warp. Receives packet `number` of a sender: take(bit, weights), one lane per token; weights are null if the
// packet does not arrive.
template <typename Take>
CROSSDOCK_DEVICE void receive_weights(const Ctx& ctx, const HtCommon& c, const HtSlots& slots,
                                      const Operation& operation, uint32_t sender, uint32_t number, uint32_t mask,
                                      Take take) {
    const uint32_t channel = ctx.block_idx();
    const bool is_remote_peer = is_remote(c.reach, sender);
    const GinRing gin_ring = GinRing::of_weights(c, sender, channel);
    const LsaRing ring = LsaRing::weights_from(c, sender, channel);
    bool came = false;
    if (is_leader(ctx)) {
        came = is_remote_peer ? gin_ring.wait_packet(ctx, operation, slots, number)
                              : ring.wait_packet(ctx, operation, slots, number);
    }
    came = ctx.warp_broadcast(came ? 1u : 0u) != 0;
    const float* weights = reinterpret_cast<const float*>(ring.packet(slots, number));
    const uint32_t per_row = weights_per_row(c.topk, c.arena.experts_per_rank);
    CROSSDOCK_ROLLED
    for (uint32_t bit = ctx.lane(); bit < kChunkTokens; bit += kLanes) {
        if ((mask >> bit & 1) != 0) take(bit, came ? weights + ones_below(mask, bit) * per_row : nullptr);
    }
    ctx.warp_sync();
    if (came && is_leader(ctx)) {
        if (is_remote_peer) {
            gin_ring.give_credit(ctx, operation, slots, number);
        } else {
            ring.give_credit(ctx, operation, slots, number);
        }
    }
    ctx.warp_sync();
}

// A channel's chunks, and the pieces of work per chunk.
struct WeightPieces {
    uint32_t chunks;
    uint32_t per_chunk;

    CROSSDOCK_DEVICE uint32_t num() const { return chunks * per_chunk; }
};

// The warps that exchange weights: the first half sends, the others receive; a single warp does both, one chunk at a
// time. Pieces are taken in the order of chunks, so no warp waits for a later one.
template <typename Send, typename Receive>
CROSSDOCK_DEVICE void share_weights(uint32_t warp, uint32_t warps, WeightPieces sent, WeightPieces received, Send send,
                                    Receive receive) {
    if (warps == 1) {
        CROSSDOCK_ROLLED
        for (uint32_t chunk = 0; chunk < sent.chunks || chunk < received.chunks; ++chunk) {
            CROSSDOCK_ROLLED
            for (uint32_t i = 0; i < sent.per_chunk && chunk < sent.chunks; ++i) send(chunk * sent.per_chunk + i);
            CROSSDOCK_ROLLED
            for (uint32_t i = 0; i < received.per_chunk && chunk < received.chunks; ++i)
                receive(chunk * received.per_chunk + i);
        }
        return;
    }
    const uint32_t senders = warps / 2;
    if (warp < senders) {
        CROSSDOCK_ROLLED
        for (uint32_t i = warp; i < sent.num(); i += senders) send(i);
    } else {
        CROSSDOCK_ROLLED
        for (uint32_t i = warp - senders; i < received.num(); i += warps - senders) receive(i);
    }
}

}  // namespace
}  // namespace crossdock
