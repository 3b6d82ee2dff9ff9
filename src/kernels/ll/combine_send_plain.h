// SPDX-License-Identifier: Apache-2.0
// Combine, send half: plain rows, unchanged or computed here.
#pragma once

#include "device/sum_rows.h"
#include "kernels/ll/returns.h"

namespace crossdock {
namespace {

// Unchanged plain rows: the leader of each warp with a stage sends one after the other through it.
template <typename Op>
class PlainReturns {
  public:
    CROSSDOCK_DEVICE explicit PlainReturns(const Op& op)
        : op_(op),
          ctx_(op.ctx),
          args_(op.args),
          stage_(stage_of(op.ctx, op.args.shared, op.ctx.warp_idx())),
          list_(op, false),
          experts_(op) {}

    // Which rows to send next.
    CROSSDOCK_DEVICE void choose(const CrossingPart& part) { list_.choose(part); }
    // Starts loading the first row: before the operation is known, unless experts still compute. Call after a block
    // barrier that follows ReturnList::count.
    CROSSDOCK_DEVICE void start() {
        if (waits_for_experts(args_)) experts_.begin();
        number_ = op_.warp() * op_.blocks() + op_.block();
        step_ = op_.c.warp_layout.num_stages * op_.blocks();
        size_ = list_.size();
        find_and_load();
    }
    CROSSDOCK_DEVICE void run() {
        while (number_ < size_) {
            if (!is_there_) {
                // The source has fewer rows than others.
            } else if (row_.row_idx >= 0) {
                send();
            } else if (list_.has_cell(row_) && op_.wait_credit(row_.source)) {
                note_cell_written(op_, row_);
                leave_empty(op_, row_, list_);
            }
            number_ += step_;
            find_and_load();
        }
    }
    // If nothing is sent: waits for the load that was issued, before the stage's memory is freed.
    CROSSDOCK_DEVICE void abandon() {
        if (is_there_ && row_.row_idx >= 0) stage_.wait_loaded(ctx_, round_);
    }

  private:
    CROSSDOCK_DEVICE uint32_t chunk_at(uint32_t first) const {
        const uint32_t left = args_.row_bytes - first;
        return left < op_.c.warp_layout.chunk_bytes ? left : op_.c.warp_layout.chunk_bytes;
    }
    CROSSDOCK_DEVICE const std::byte* source() const {
        return args_.tokens + static_cast<uint64_t>(row_.row_idx) * args_.row_bytes;
    }
    CROSSDOCK_DEVICE void find_and_load() {
        is_there_ = number_ < size_ && list_.find(number_, row_);
        if (is_there_ && waits_for_experts(args_)) is_there_ = experts_.wait_all(row_);
        if (is_there_ && row_.row_idx >= 0) stage_.load(ctx_, source(), chunk_at(0));
    }
    CROSSDOCK_DEVICE void send() {
        const bool has_credit = list_.has_cell(row_) && op_.wait_credit(row_.source);
        const CellTarget target(op_, row_, list_);
        if (has_credit) note_cell_written(op_, row_);
        CROSSDOCK_ROLLED
        for (uint32_t first = 0; first < args_.row_bytes; first += op_.c.warp_layout.chunk_bytes) {
            const uint32_t chunk = chunk_at(first);
            if (first > 0) stage_.load(ctx_, source() + first, chunk);
            stage_.wait_loaded(ctx_, round_++);
            ctx_.mark(Step::kCombineLoaded);
            if (has_credit) stage_.store(ctx_, target.memory() + first, 0, chunk);
            RowStage::end_group(ctx_);
            ctx_.mark(Step::kCombineStored);
            stage_.wait_reusable(ctx_);
        }
        if (!has_credit) return;
        RowStage::wait_stores(ctx_);
        ctx_.mark(Step::kCombineLanded);
        target.finish(op_, row_);
        ctx_.mark(Step::kCombineFlagged);
    }

    const Op& op_;
    const Ctx& ctx_;
    decltype(Op::args) args_;
    RowStage stage_;
    ReturnList<Op> list_;
    ExpertsDone<Op> experts_;
    uint32_t number_ = 0;
    uint32_t step_ = 0;
    uint32_t size_ = 0;
    uint32_t round_ = 0;  // loads of the stage
    bool is_there_ = false;
    Return row_;
};

// Computed plain rows: a block fills its stages together, then warps send one each.
template <DType kDType, typename Op>
class ComputedReturns {
  public:
    CROSSDOCK_DEVICE explicit ComputedReturns(const Op& op, const CrossingPart& part = {})
        : op_(op), ctx_(op.ctx), args_(op.args), list_(op, false), experts_(op) {
        list_.choose(part);
    }

    CROSSDOCK_DEVICE void run() {
        if (waits_for_experts(args_)) experts_.begin();
        const uint32_t blocks = op_.blocks();
        const uint32_t stages = op_.c.warp_layout.num_stages;
        const uint32_t warps = op_.warps();
        const uint32_t warp = op_.warp();
        const uint32_t total = list_.size();
        CROSSDOCK_ROLLED
        for (uint32_t base = op_.block(); base < total; base += stages * blocks) {
            const uint32_t left = (total - base + blocks - 1) / blocks;
            const uint32_t num = left < stages ? left : stages;
            const uint32_t parts = num < warps ? warps / num : 1;  // warps that share a row
            CROSSDOCK_ROLLED
            for (uint32_t row_first = 0; row_first < args_.wire_bytes; row_first += op_.c.warp_layout.chunk_bytes) {
                CROSSDOCK_ROLLED
                for (uint32_t i = warp; i < num * parts; i += warps) {
                    if (list_.find(base + i / parts * blocks, row_) && wait_experts())
                        compute(i / parts, row_first, i % parts, parts);
                }
                RowStage::filled();
                ctx_.block_sync();
                CROSSDOCK_ROLLED
                for (uint32_t i = warp; i < num; i += warps) {
                    const RowStage::Lead lead(ctx_);
                    if (lead && list_.find(base + i * blocks, row_) && list_.has_cell(row_) && are_experts_done() &&
                        op_.wait_credit(row_.source))
                        send(i, row_first);
                }
                ctx_.block_sync();
            }
        }
    }

  private:
    CROSSDOCK_DEVICE uint32_t chunk_at(uint32_t first) const {
        const uint32_t left = args_.wire_bytes - first;
        return left < op_.c.warp_layout.chunk_bytes ? left : op_.c.warp_layout.chunk_bytes;
    }
    // One warp.
    CROSSDOCK_DEVICE bool wait_experts() const {
        if (!waits_for_experts(args_)) return true;
        return ctx_.warp_broadcast(is_leader(ctx_) && experts_.wait_all(row_) ? 1u : 0u) != 0;
    }
    // One thread: after a wait that failed, nothing is sent.
    CROSSDOCK_DEVICE bool are_experts_done() const {
        uint32_t late = 0;
        return !waits_for_experts(args_) || experts_.has_all(row_, late);
    }
    // Computes the row's bytes from row_first on; this warp is the part-th of `parts` that share the row.
    CROSSDOCK_DEVICE void compute(uint32_t stage, uint32_t row_first, uint32_t part, uint32_t parts) const {
        constexpr uint32_t kSegmentBytes = 1024;
        std::byte* target = stage_of(ctx_, args_.shared, stage).data();
        if (is_quantised(args_.wire)) {
            if (part == 0 && row_.row_idx >= 0) {
                quantise_row(ctx_, args_.wire, args_.tokens + static_cast<uint64_t>(row_.row_idx) * args_.row_bytes,
                             args_.row_bytes / 2, args_.row_scales, row_.row_idx, target);
            }
            return;
        }
        const SummandLists summands = summands_of_warp(ctx_, args_);
        list_summands(op_, row_, summands);
        const uint32_t chunk = chunk_at(row_first);
        CROSSDOCK_ROLLED
        for (uint32_t first = part * kSegmentBytes; first < chunk; first += parts * kSegmentBytes) {
            const uint32_t bytes = chunk - first < kSegmentBytes ? chunk - first : kSegmentBytes;
            sum_rows<kDType>(
                ctx_, RowSummands{args_.tokens, args_.row_bytes, summands.index, summands.weight, op_.c.topk},
                (row_first + first) / dtype_bytes(kDType), bytes / dtype_bytes(kDType), target - row_first);
        }
        ctx_.warp_sync();
    }
    CROSSDOCK_DEVICE void send(uint32_t stage, uint32_t row_first) const {
        const RowStage from = stage_of(ctx_, args_.shared, stage);
        const uint32_t chunk = chunk_at(row_first);
        const CellTarget target(op_, row_, list_);
        if (row_first == 0) note_cell_written(op_, row_);
        if (row_.row_idx >= 0) from.store(ctx_, target.memory() + row_first, 0, chunk);
        RowStage::end_group(ctx_);
        RowStage::wait_stores(ctx_);
        from.wait_reusable(ctx_);
        if (row_first + chunk < args_.wire_bytes) return;
        if (row_.row_idx >= 0) {
            target.finish(op_, row_);
        } else {
            leave_empty(op_, row_, list_);
        }
    }

    const Op& op_;
    const Ctx& ctx_;
    decltype(Op::args) args_;
    ReturnList<Op> list_;
    ExpertsDone<Op> experts_;
    Return row_;
};

}  // namespace
}  // namespace crossdock
