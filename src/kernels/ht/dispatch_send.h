// SPDX-License-Identifier: Apache-2.0
// High-throughput dispatch, send half: a warp takes a token, loads its row once, and stores it to every rank that hosts
// one of its experts: straight into the receiver's tensors where those are windows, else into a packet of its ring.
//
// Whoever waits in here, and in the other three halves, works in the order of tokens within its channel, and waits only
// for what comes earlier in that order. So there is always somebody who can go on, however small the rings are.
#pragma once

#include "kernels/ht/labels.h"

namespace crossdock {
inline namespace CROSSDOCK_WORLD {

// What a warp does one after the other: a part of a token's row, to some peers, a lane a peer.
struct SendStep {
    uint32_t at;     // of the token, among those of the channel
    uint32_t base;   // the first of the peers
    uint32_t first;  // byte of the row; row_bytes: its scales

    CROSSDOCK_DEVICE bool is_first() const { return first == 0; }
    CROSSDOCK_DEVICE bool is_last(const HtDispatchArgs& args) const {
        return args.scale_bytes > 0 ? first == args.row_bytes : first + args.crew.chunk_bytes >= args.row_bytes;
    }
    CROSSDOCK_DEVICE uint32_t bytes(const HtDispatchArgs& args) const {
        if (first == args.row_bytes) return args.scale_bytes;
        const uint32_t left = args.row_bytes - first;
        return left < args.crew.chunk_bytes ? left : args.crew.chunk_bytes;
    }
    CROSSDOCK_DEVICE const std::byte* source(const HtDispatchArgs& args, uint32_t token) const {
        return first == args.row_bytes ? args.scales + uint64_t{token} * args.scale_bytes
                                       : args.tokens + uint64_t{token} * args.row_bytes + first;
    }
    CROSSDOCK_DEVICE SendStep next(const HtDispatchArgs& args) const {
        if (!is_last(args)) {
            const uint32_t end = first + args.crew.chunk_bytes;
            return {at, base, end < args.row_bytes ? end : args.row_bytes};
        }
        if (base + kLanes < args.common.arena.num_ranks) return {at, base + kLanes, 0};
        return {at + args.crew.producers, 0, 0};
    }
};

// Where a lane's peer wants the row.
struct Target {
    bool exists;
    bool is_direct;
    uint32_t packet;
    std::byte* row;
    std::byte* scales;
};

class RowSender {
  public:
    CROSSDOCK_DEVICE RowSender(const Ctx& ctx, const HtDispatchArgs& args, const Operation& operation)
        : args_(args),
          operation_(operation),
          channel_(static_cast<uint32_t>(ctx.block_idx())),
          range_(ChunkRange::of(args.common.tables.routing->num_tokens, channel_, args.common.channels)),
          batch_(ctx, args.shared) {}

    CROSSDOCK_DEVICE void run(const Ctx& ctx) {
        // A handle over another's memory may be told of fewer tokens.
        const uint32_t routed = args_.common.tables.routing->num_tokens;
        const uint32_t tokens = routed < args_.common.num_tokens ? routed : args_.common.num_tokens;
        const uint32_t before = range_.first * kChunkTokens;
        const uint32_t all = range_.size() * kChunkTokens;
        const uint32_t end = tokens <= before ? 0 : tokens - before < all ? tokens - before : all;
        SendStep step{static_cast<uint32_t>(ctx.warp_idx()), 0, 0};
        if (step.at < end) load(ctx, step, 0);
        Target target{};
        CROSSDOCK_ROLLED
        for (uint32_t round = 0; step.at < end; ++round) {
            const SendStep next = step.next(args_);
            if (next.at < end) {
                stage(ctx, round + 1).wait_reusable(ctx);
                ctx.warp_sync();
                load(ctx, next, round + 1);
            }
            if (step.is_first()) target = target_of(ctx, step);
            const RowStage from = stage(ctx, round);
            from.wait_loaded(ctx, round / 2);
            if (target.exists)
                from.store(ctx, step.first == args_.row_bytes ? target.scales : target.row + step.first, 0,
                           step.bytes(args_));
            RowStage::end_group(ctx);
            if (step.is_last(args_)) {
                if (target.exists && !target.is_direct)
                    batch_.add(static_cast<int>(step.base) + ctx.lane(), target.packet);
                if (ctx.warp_any(batch_.is_full())) flush(ctx);
            }
            step = next;
        }
        flush(ctx);
        // Rows that went straight to their places are announced by the block, when all of its warps are here.
        RowStage::wait_stores(ctx);
        ctx.fence_landed();
    }

  private:
    CROSSDOCK_DEVICE RowStage stage(const Ctx& ctx, uint32_t round) const {
        return stage_of_warp(ctx, args_.crew, args_.shared, round % 2);
    }
    CROSSDOCK_DEVICE void load(const Ctx& ctx, const SendStep& step, uint32_t round) const {
        const uint32_t token = range_.first * kChunkTokens + step.at;
        if (is_leader(ctx)) stage(ctx, round).load(ctx, step.source(args_, token), step.bytes(args_));
    }
    CROSSDOCK_DEVICE void flush(const Ctx& ctx) { batch_.flush(ctx, args_.common, operation_, args_.rows.num); }

    // Waits for a free slot where one is needed; before that, what has been sent is announced.
    CROSSDOCK_DEVICE Target target_of(const Ctx& ctx, const SendStep& step) {
        const HtCommon& c = args_.common;
        const uint32_t peer = step.base + static_cast<uint32_t>(ctx.lane());
        const int rank = static_cast<int>(peer);
        Target target{};
        bool must_wait = false;
        uint32_t number = 0;
        if (peer < c.arena.num_ranks && peer_states(ctx, args_.shared)[peer] != kAbsent) {
            const SentRow sent =
                sent_row(c, rank, range_.first + step.at / kChunkTokens, step.at % kChunkTokens, range_);
            number = c.tables.bases[peer] + sent.number;
            target.exists = sent.exists && travels(c, number);
            target.is_direct = peer_states(ctx, args_.shared)[peer] == kDirect;
            target.packet = sent.packet;
            must_wait = target.exists && !target.is_direct &&
                        !has_credit(ctx, c, c.offsets.rows, operation_, rank, channel_, sent.packet, args_.rows.num);
        }
        if (ctx.warp_any(must_wait)) flush(ctx);
        if (!target.exists) return target;
        if (target.is_direct) {
            target.row = args_.token_windows.at(rank, uint64_t{number} * args_.row_bytes);
            if (args_.scale_bytes > 0)
                target.scales = args_.scale_windows.at(rank, uint64_t{number} * args_.scale_bytes);
            return target;
        }
        if (!wait_credit(ctx, c, c.offsets.rows, operation_, rank, channel_, target.packet, args_.rows.num)) return {};
        const Ring ring = Ring::of(c, c.offsets.rows, rank, c.rank, channel_);
        note_packet_written(ctx, c, c.offsets.rows, operation_, rank, ring, target.packet, args_.rows.num);
        target.row = ring.packets + uint64_t{target.packet % args_.rows.num} * args_.rows.stride;
        target.scales = target.row + args_.row_bytes;
        return target;
    }

    const HtDispatchArgs& args_;
    const Operation& operation_;
    uint32_t channel_;
    ChunkRange range_;
    FlagBatch batch_;
};

// The weights of a chunk of own tokens to one peer.
CROSSDOCK_DEVICE void send_weights(const Ctx& ctx, const HtDispatchArgs& args, const Operation& operation, int peer,
                                   uint32_t chunk, const ChunkRange& range) {
    const HtCommon& c = args.common;
    const uint32_t mask = c.tables.sent_masks[static_cast<uint32_t>(peer) * c.tables.chunks + chunk];
    if (mask == 0) return;
    const int32_t experts = static_cast<int32_t>(c.arena.experts_per_rank);
    send_labels(ctx, c, args.labels, operation, peer, chunk - range.first, mask, [&](uint32_t bit, float* weights) {
        const uint32_t token = chunk * kChunkTokens + bit;
        if (token >= c.num_tokens) return;
        uint32_t num = 0;
        CROSSDOCK_ROLLED
        for (int32_t from = peer * experts;;) {
            const NextExpert next = NextExpert::of(c, token, from, (peer + 1) * experts);
            if (next.id < 0) return;
            weights[num++] = args.topk_weights[uint64_t{token} * c.topk + next.choice];
            from = next.id + 1;
        }
    });
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
