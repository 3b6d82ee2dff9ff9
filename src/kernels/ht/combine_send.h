// SPDX-License-Identifier: Apache-2.0
// High-throughput combine, send half: the rows that came from a rank go back to it, one a token: a flat row as it is,
// expert-major rows of one token summed first. A home rank that may read the rows where they lie needs none of this.
#pragma once

#include "device/sum_rows.h"
#include "kernels/ht/labels.h"

namespace crossdock {
inline namespace CROSSDOCK_WORLD {

// What a warp does one after the other: a part of a row that goes home, or nothing where there is no such row.
struct ReturnStep {
    uint32_t at;     // of the token, among those of its home in this channel
    uint32_t n;      // of its home, counted from this rank on
    uint32_t first;  // byte of the row

    CROSSDOCK_DEVICE int home(const HtCommon& c) const {
        return static_cast<int>((static_cast<uint32_t>(c.rank) + n) % c.arena.num_ranks);
    }
    CROSSDOCK_DEVICE ReturnStep next(const HtCombineArgs& args, bool has_row) const {
        if (has_row && first + args.crew.chunk_bytes < args.row_bytes) return {at, n, first + args.crew.chunk_bytes};
        if (n + 1 < args.common.arena.num_ranks) return {at, n + 1, 0};
        return {at + args.crew.producers, 0, 0};
    }
};

template <DType kDType>
class RowReturner {
  public:
    CROSSDOCK_DEVICE RowReturner(const Ctx& ctx, const HtCombineArgs& args, const Operation& operation)
        : args_(args),
          operation_(operation),
          channel_(static_cast<uint32_t>(ctx.block_idx())),
          end_(most_chunks(args.common, channel_) * kChunkTokens),
          plan_(HtPlan::of_warp(ctx, args.shared, args.common.topk)),
          batch_(ctx, args.shared) {}

    // The row of a step sets out for its stage while the one before is on its way home.
    CROSSDOCK_DEVICE void run(const Ctx& ctx) {
        const bool prefetches = args_.crew.producer_stages > 1;
        ReturnStep step{static_cast<uint32_t>(ctx.warp_idx()), 0, 0};
        ReceivedRow row = find(ctx, step);
        if (prefetches) fetch(ctx, step, row, 0);
        CROSSDOCK_ROLLED
        for (uint32_t round = 0; row.exists; ++round) {
            ReturnStep next = step.next(args_, true);
            ReceivedRow next_row = next.first > 0 ? row : find(ctx, next);
            fetch(ctx, prefetches ? next : step, prefetches ? next_row : row, prefetches ? round + 1 : round);
            if (step.first == 0) has_credit_ = wait_for_slot(ctx, step, row);
            if (args_.common.expert_major) {
                sum(ctx, step, round);
            } else if (is_loaded(row)) {
                const uint32_t bit = 1u << round % args_.crew.producer_stages;
                stage(ctx, round).wait_loaded(ctx, (phases_ & bit) != 0 ? 1 : 0);
                phases_ ^= bit;
            }
            ctx.warp_sync();
            if (has_credit_ && is_leader(ctx)) send(ctx, step, row, round);
            if (step.first + args_.crew.chunk_bytes >= args_.row_bytes) {
                if (has_credit_ && is_leader(ctx)) batch_.add(step.home(args_.common), row.packet);
                if (ctx.warp_any(batch_.is_full())) flush(ctx);
            }
            ctx.warp_sync();
            step = next;
            row = next_row;
        }
        flush(ctx);
        RowStage::wait_stores(ctx);
    }

  private:
    CROSSDOCK_DEVICE RowStage stage(const Ctx& ctx, uint32_t round) const {
        return stage_of_warp(ctx, args_.crew, args_.shared, round % args_.crew.producer_stages);
    }
    CROSSDOCK_DEVICE void flush(const Ctx& ctx) { batch_.flush(ctx, args_.common, operation_, args_.rows.num); }
    CROSSDOCK_DEVICE uint32_t part(const ReturnStep& step) const {
        const uint32_t left = args_.row_bytes - step.first;
        return left < args_.crew.chunk_bytes ? left : args_.crew.chunk_bytes;
    }
    CROSSDOCK_DEVICE bool is_loaded(const ReceivedRow& row) const {
        return !args_.common.expert_major && row.number < args_.token_rows;
    }

    // The row of that step; where there is none, moves on to the next step that has one.
    CROSSDOCK_DEVICE ReceivedRow find(const Ctx& ctx, ReturnStep& step) const {
        const HtCommon& c = args_.common;
        CROSSDOCK_ROLLED
        for (; step.at < end_; step = step.next(args_, false)) {
            const int home = step.home(c);
            if (peer_states(ctx, args_.shared)[home] != kEntered) continue;
            const ChunkRange range = ChunkRange::of(c.tables.source_tokens[home], channel_, c.channels);
            if (step.at / kChunkTokens >= range.size()) continue;
            const ReceivedRow row =
                received_row(c, home, range.first + step.at / kChunkTokens, step.at % kChunkTokens, range);
            if (row.exists && travels(c, row.number)) return row;
        }
        return {false, 0, 0};
    }

    CROSSDOCK_DEVICE void fetch(const Ctx& ctx, const ReturnStep& step, const ReceivedRow& row, uint32_t round) const {
        if (!row.exists || !is_loaded(row)) return;
        const RowStage to = stage(ctx, round);
        if (is_leader(ctx)) {
            to.wait_reusable(ctx);
            to.load(ctx, args_.tokens + uint64_t{row.number} * args_.row_bytes + step.first, part(step));
        }
        ctx.warp_sync();
    }

    // Before it waits, what has been sent is announced.
    CROSSDOCK_DEVICE bool wait_for_slot(const Ctx& ctx, const ReturnStep& step, const ReceivedRow& row) {
        const HtCommon& c = args_.common;
        const int home = step.home(c);
        const bool is_free = has_credit(ctx, c, c.offsets.rows, operation_, home, channel_, row.packet, args_.rows.num);
        if (!ctx.warp_all(is_free)) flush(ctx);
        bool may_send = false;
        if (is_leader(ctx)) {
            may_send = wait_credit(ctx, c, c.offsets.rows, operation_, home, channel_, row.packet, args_.rows.num);
            if (may_send)
                note_packet_written(ctx, c, c.offsets.rows, operation_, home,
                                    Ring::of(c, c.offsets.rows, home, c.rank, channel_), row.packet, args_.rows.num);
        }
        return ctx.warp_broadcast(may_send ? 1u : 0u) != 0;
    }

    // Expert-major: the token's rows here, summed into a stage.
    CROSSDOCK_DEVICE void sum(const Ctx& ctx, const ReturnStep& step, uint32_t round) const {
        const HtCommon& c = args_.common;
        const int home = step.home(c);
        const ChunkRange range = ChunkRange::of(c.tables.source_tokens[home], channel_, c.channels);
        const uint32_t num = list_slots(ctx, c, home, range.first + step.at / kChunkTokens, step.at % kChunkTokens,
                                        args_.token_rows, plan_);
        CROSSDOCK_ROLLED
        for (uint32_t i = static_cast<uint32_t>(ctx.lane()); i < num; i += kLanes)
            plan_.rows[i] = args_.tokens + uint64_t{plan_.slots[i]} * args_.row_bytes;
        const RowStage to = stage(ctx, round);
        to.wait_reusable(ctx);
        ctx.warp_sync();
        sum_rows<kDType>(ctx, PointerTerms{plan_.rows, num}, step.first / dtype_bytes(kDType),
                         part(step) / dtype_bytes(kDType), to.data() - step.first);
        to.filled();
    }

    CROSSDOCK_DEVICE void send(const Ctx& ctx, const ReturnStep& step, const ReceivedRow& row, uint32_t round) const {
        const HtCommon& c = args_.common;
        const Ring ring = Ring::of(c, c.offsets.rows, step.home(c), c.rank, channel_);
        if (c.expert_major || is_loaded(row))
            stage(ctx, round)
                .store(ctx, ring.packets + uint64_t{row.packet % args_.rows.num} * args_.rows.stride + step.first, 0,
                       part(step), true);
        RowStage::end_group(ctx);
    }

    const HtCombineArgs& args_;
    const Operation& operation_;
    uint32_t channel_;
    uint32_t end_;
    HtPlan plan_;
    FlagBatch batch_;
    bool has_credit_ = false;
    uint32_t phases_ = 0;  // bit i: of the next load of stage i
};

// The gradients of a chunk's weights go back to the home of its tokens.
CROSSDOCK_DEVICE void return_weights(const Ctx& ctx, const HtCombineArgs& args, const Operation& operation, int home,
                                     uint32_t chunk, const ChunkRange& range) {
    const HtCommon& c = args.common;
    const uint32_t entry = static_cast<uint32_t>(home) * c.tables.chunks + chunk;
    const uint32_t mask = c.tables.masks[entry];
    send_labels(ctx, c, args.labels, operation, home, chunk - range.first, mask, [&](uint32_t bit, float* weights) {
        const uint64_t* bitmap = bitmap_of(c, home, chunk * kChunkTokens + bit);
        const uint64_t row = c.tables.firsts[entry] + ones_below(mask, bit);
        WeightWriter writer(weights);
        uint32_t num = 0;
        CROSSDOCK_ROLLED
        for (uint32_t w = 0; w < c.tables.words; ++w) {
            CROSSDOCK_ROLLED
            for (uint64_t bits = bitmap[w]; bits != 0; bits &= bits - 1, ++num) {
                const uint64_t at = c.expert_major ? slot_of(c, 64 * w + lowest_one(bits), home, chunk, bit) : row;
                const bool is_here = at < c.budget && at < args.token_rows;
                writer.add(!is_here ? 0.0f : args.weights[c.expert_major ? at : at * c.topk + num]);
            }
        }
        writer.flush();
    });
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
