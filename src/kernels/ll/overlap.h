// SPDX-License-Identifier: Apache-2.0
// Experts that start while rows arrive, and whose rows are sent while others are computed: the dispatch publishes each
// block of rows once it is in place, and the combine waits for the caller's counter of a block before it sends its
// rows. Where the words are: crossdock/overlap.hpp; contract: crossdock.h, crossdockHandleSetOverlap.
#pragma once

#include "kernels/ll/operation.h"
#include "kernels/overlap.h"

namespace crossdock {
namespace {

// A block of rows: of an expert (expert-major) or a source (rank-major).
struct RowBlock {
    uint32_t zone;
    uint32_t block;

    CROSSDOCK_DEVICE static RowBlock of(const LlOverlap& overlap, uint32_t row) {
        const uint32_t zone = row / overlap.slots;
        return {zone, (row - zone * overlap.slots) / overlap.block_rows};
    }
};

// Dispatch, receive half. A row may be placed in parts, which different warps do at different times: together they add
// kRow to its block's word, and who completes the block publishes it.
template <typename Op>
class RowPublisher {
  public:
    static constexpr uint32_t kRow = 1024;
    static_assert(kMostLl128RowBytes / kLinePayload < kRow, "every part of a row adds something");

    CROSSDOCK_DEVICE explicit RowPublisher(const Op& op)
        : ctx_(op.ctx),
          overlap_(op.c.overlap),
          words_(overlap_.memory, OverlapLayout{overlap_.zones, overlap_.blocks}) {}
    CROSSDOCK_DEVICE void begin() { words_.begin(ctx_); }

    CROSSDOCK_DEVICE void clear_next(const WorkShare& share) const {
        words_.clear_next(share.block * share.threads() + share.thread(ctx_),
                          uint64_t{share.num_blocks} * share.threads());
    }
    // One thread per zone.
    CROSSDOCK_DEVICE void publish_count(uint32_t zone, uint32_t rows) const { words_.publish_count(ctx_, zone, rows); }
    // One warp, after the barrier that follows its stores; what the leader stored asynchronously has landed. rows_of: a
    // zone's rows. begin, end: which of a row's `of` pieces this warp has placed.
    CROSSDOCK_DEVICE void publish(const Placement& placement, uint32_t begin, uint32_t end, uint32_t of,
                                  const uint32_t* rows_of) const {
        const uint32_t share = end * kRow / of - begin * kRow / of;
        for_lanes(ctx_, *placement.num, [&](uint32_t i) {
            const RowBlock at = RowBlock::of(overlap_, placement.rows[i]);
            const uint32_t left = rows_of[at.zone] - at.block * overlap_.block_rows;
            const uint32_t rows = left < overlap_.block_rows ? left : overlap_.block_rows;
            words_.add(ctx_, at.zone, at.block, share, rows * kRow, rows);
        });
        ctx_.warp_sync();
    }
    // All of the block's receiving warps, when they place no more rows.
    CROSSDOCK_DEVICE void finish(const WorkShare& share) const {
        share.sync(ctx_);  // all have read the turn
        if (share.thread(ctx_) == 0) words_.finish(ctx_, share.num_blocks);
    }

  private:
    const Ctx& ctx_;
    const LlOverlap& overlap_;
    PublishedTurn words_;
};

// A row that returns to its source rank.
struct Return {
    uint32_t source = 0;
    uint32_t i = 0;       // among the source's rows or, with a row per choice, its choices
    int64_t row_idx = 0;  // among all rows here; -1: the choice had no room
    uint32_t cell = 0;
};

// Combine, send half.
template <typename Op>
class ExpertsDone {
  public:
    CROSSDOCK_DEVICE explicit ExpertsDone(const Op& op) : op_(op), ctx_(op.ctx), overlap_(op.c.overlap) {}
    // After earlier kernels have ended: the turn is that of the last dispatch.
    CROSSDOCK_DEVICE void begin() {
        done_ = overlap_.done;
        if (done_ != nullptr) return;
        const OverlapLayout layout{overlap_.zones, overlap_.blocks};
        const uint32_t turn = ctx_.load_relaxed_device(overlap_.memory + OverlapLayout::kDispatches) - 1;
        done_ = overlap_.memory + layout.done(turn, 0, 0);
    }

    // The number of a row's counter.
    CROSSDOCK_DEVICE uint32_t block_of(uint32_t row) const {
        const RowBlock at = RowBlock::of(overlap_, row);
        return at.zone * overlap_.blocks + at.block;
    }
    // One thread. If a row's block is done, its bytes may be read, by asynchronous loads, too.
    CROSSDOCK_DEVICE bool has(uint32_t row) const {
        if (ctx_.load_acquire_device(word_of(row)) < overlap_.done_value) return false;
        ctx_.fence_async_copies();
        return true;
    }
    // One thread. Whether that holds for all rows that a row is made of; if not, `late` is one for which it does not.
    CROSSDOCK_DEVICE bool has_all(const Return& row, uint32_t& late) const {
        if (op_.args.wire != LlCombineWire::kSums) {
            late = static_cast<uint32_t>(row.row_idx);
            return row.row_idx < 0 || has(late);
        }
        const int32_t* summands = reinterpret_cast<const int32_t*>(row_record(op_.c, row.source, row.i) + 1);
        CROSSDOCK_ROLLED
        for (uint32_t k = 0; k < op_.c.topk; ++k) {
            if (static_cast<uint32_t>(summands[k]) >= num_rows_here(op_.args)) continue;
            late = static_cast<uint32_t>(summands[k]);
            if (!has(late)) return false;
        }
        return true;
    }
    // The same, waiting. Returns false if a row does not come.
    CROSSDOCK_DEVICE bool wait_all(const Return& row) const {
        for (uint32_t late = 0; !has_all(row, late);) {
            if (!wait(late)) return false;
        }
        return true;
    }
    CROSSDOCK_DEVICE bool wait(uint32_t row) const {
        const uint32_t* word = word_of(row);
        const bool came = poll_until(
            ctx_, [&] { return uint64_t{ctx_.load_acquire_device(word)}; },
            [&](uint64_t seen) { return seen >= overlap_.done_value; }, [&](uint64_t) { return may_wait(row); });
        ctx_.fence_async_copies();
        return came;
    }
    // One thread, after failed polls. Returns false if the group has failed, the program interrupts the wait, or the
    // wait has timed out, which fails the group. expected and seen of the record have the zone and the block in their
    // upper halves.
    CROSSDOCK_DEVICE bool may_wait(uint32_t row) const {
        const RowBlock at = RowBlock::of(overlap_, row);
        return may_wait_for_experts(ctx_, op_.c.scope, op_, uint64_t{at.zone} << 32 | overlap_.done_value,
                                    uint64_t{at.block} << 32 | ctx_.load_relaxed_device(word_of(row)));
    }

  private:
    CROSSDOCK_DEVICE const uint32_t* word_of(uint32_t row) const { return done_ + block_of(row); }
    CROSSDOCK_DEVICE_RARE static bool may_wait_for_experts(const Ctx& ctx, const WaitScope& scope, Operation operation,
                                                           uint64_t expected, uint64_t seen) {
        if (has_failed(ctx, scope)) return false;
        const bool is_interrupted = ctx.is_interrupted();
        // Earlier than the peers' waits for these rows, so that the first message names the cause.
        const uint64_t deadline_ns = operation.start_ns + scope.timeout_ns - scope.timeout_ns / 8;
        if (!is_interrupted && ctx.now_ns() < deadline_ns) {
            ctx.pause(deadline_ns);
            return true;
        }
        WaitScope own = scope;
        own.masking = 0;  // this rank's own experts are late: no peer is lost
        record_expired_wait(ctx, own, operation, is_interrupted ? WaitStep::kInterrupted : WaitStep::kExperts,
                            scope.rank, expected, seen);
        return false;
    }

    const Op& op_;
    const Ctx& ctx_;
    const LlOverlap& overlap_;
    const uint32_t* done_ = nullptr;
};

}  // namespace
}  // namespace crossdock
