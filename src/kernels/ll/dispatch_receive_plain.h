// SPDX-License-Identifier: Apache-2.0
// Dispatch, receive half: plain rows, and this rank's own rows that have stayed in its stages.
#pragma once

#include "kernels/ll/elastic_header.h"
#include "kernels/ll/overlap.h"
#include "kernels/ll/received_counts.h"
#include "kernels/ll/row_scales.h"

namespace crossdock {
namespace {

// The rows announced for this warp, and those that arrived.
struct RowsRead {
    uint64_t expected = 0;
    uint64_t read = 0;
};

template <typename Op>
class PlainReceiver {
  public:
    CROSSDOCK_DEVICE PlainReceiver(const Op& op, const DispatchSend<Op>& send)
        : op_(op), send_(send), ctx_(op.ctx), args_(op.args), c_(op.c), headers_(op), scales_(op) {}

    // This rank's own rows, if they stayed in the block's sending stages: each warp places that of one stage.

    // Looked up while the counts are on their way.
    CROSSDOCK_DEVICE uint32_t first_choice_of_own_row(const WorkShare& share) const {
        const uint32_t stage = share.warp(ctx_);
        return stage < send_.num_staged() ? send_.planner().choices_before(stage, c_.rank) : 0;
    }
    // first_choice: of first_choice_of_own_row.
    CROSSDOCK_DEVICE RowsRead place_own_row(const Announced& announced, const WorkShare& share,
                                            uint32_t first_choice) const {
        const uint32_t of_stage = share.warp(ctx_);
        SendTask own;
        if (of_stage >= send_.num_staged() || !send_.find_own_row(of_stage, own) ||
            own.row_idx >= announced.rows[c_.rank])
            return {};
        const Placement placement = placement_of_warp(op_);
        const auto read = [&](uint32_t base, Header& header) {
            const uint32_t k = base + op_.lane();
            header.origin.payload = send_.planner().header_word(own, 0, first_choice, 0);
            header.choice.payload = send_.planner().header_word(own, 0, first_choice, 1 + (k < c_.topk ? k : 0));
            if (kHasGinPeers) header.cells.payload = send_.planner().header_word(own, 0, first_choice, 1 + c_.topk);
            return true;
        };
        Header header;
        read(0, header);
        if (!read_header(op_, headers_, announced, {c_.rank, own.row_idx}, header, true, placement, read))
            return {1, 0};
        ctx_.mark(Step::kDispatchHeader);
        const RowStage stage = send_.stage_at(own.stage);
        if (const RowStage::Lead lead{ctx_}; lead && !send_.planner().own_rows_are_placed()) {
            if (args_.wire == LlDispatchWire::kBytes) stage.wait_loaded(ctx_, 0);
            store_places(placement, stage, 0, args_.row_bytes);
            RowStage::wait_read(ctx_);
        }
        const std::byte* scales = stage.data() + args_.shared.tail;
        scales_.place_all(placement, scales, scales_.load_first(scales));
        if (is_leader(ctx_)) count_rows(ctx_, c_.reach, c_.rank, 1, bytes_with_scales(args_));
        ctx_.warp_sync();
        ctx_.mark(Step::kDispatchPlaced);
        return {1, 1};
    }

    // Plain rows: each warp with a stage places rows through it, in the order of sources.

    CROSSDOCK_DEVICE RowsRead receive(const Announced& announced, const WorkShare& share,
                                      const RowPublisher<Op>& publisher) {
        RowsRead rows;
        const uint32_t warp = share.warp(ctx_);
        const uint32_t stages = c_.warp_layout.receive_stages;
        if (warp >= stages) return rows;
        const RowStage stage = stage_of(ctx_, args_.shared, c_.warp_layout.num_stages + warp);
        const Placement placement = placement_of_warp(op_);
        ArrivingRow row;
        CROSSDOCK_ROLLED
        for (uint32_t i = share.first(ctx_); i < announced.plain_before[c_.arena.num_ranks];
             i += stages * share.num_blocks) {
            while (announced.plain_before[row.source + 1] <= i) ++row.source;
            row.i = i - announced.plain_before[row.source];
            ++rows.expected;
            rows.read += receive_row(announced, row, placement, stage, publisher) ? 1 : 0;
        }
        return rows;
    }

  private:
    CROSSDOCK_DEVICE bool receive_row(const Announced& announced, const ArrivingRow& row, const Placement& placement,
                                      const RowStage& stage, const RowPublisher<Op>& publisher) {
        const uint32_t slot = slot_of(c_, row.source, row.i);
        const uint64_t* flag = op_.flag(c_.rank, slot);
        uint64_t seen = 0;  // of the flag, with the header
        const auto read = [&](uint32_t base, Header& header) {
            return headers_.wait(row, base, header, [&] { seen = ctx_.load_acquire_system(flag); });
        };
        Header header;
        if (!read(0, header) || !read_header(op_, headers_, announced, row, header, true, placement, read))
            return false;
        ctx_.mark(Step::kDispatchHeader);
        const bool arrived = is_leader(ctx_) && (op_.is_gin_peer(row.source) || word_epoch(seen) == op_.epoch ||
                                                 op_.wait_word(WaitStep::kRow, row.source, flag, seen));
        if (ctx_.warp_broadcast(arrived ? 1u : 0u) == 0) return false;
        ctx_.mark(Step::kDispatchArrived);
        ctx_.fence_async_copies();  // the flag was read by an ordinary load, the row is read by an asynchronous copy
        const std::byte* source = op_.row(c_.rank, slot);
        const uint32_t direct = *placement.direct;
        const std::byte* scales = source + args_.row_bytes;
        const uint64_t first_scales = scales_.load_first(scales);
        if (const RowStage::Lead lead{ctx_}; lead && (direct & kDirectTokens) == 0) {
            place_row(placement, stage, source);
            if (publishes_rows(args_)) {
                RowStage::wait_stores(ctx_);
                ctx_.fence_landed();
            }
        }
        if ((direct & kDirectScales) == 0) scales_.place_all(placement, scales, first_scales);
        if (is_leader(ctx_)) op_.note_read(slot);
        ctx_.warp_sync();
        if (publishes_rows(args_)) publisher.publish(placement, 0, 1, 1, rows_of_zones(c_, announced));
        ctx_.mark(Step::kDispatchPlaced);
        return true;
    }
    // The leader.
    CROSSDOCK_DEVICE void place_row(const Placement& placement, const RowStage& stage, const std::byte* source) {
        CROSSDOCK_ROLLED
        for (uint32_t first = 0; first < args_.row_bytes; first += c_.warp_layout.chunk_bytes) {
            const uint32_t left = args_.row_bytes - first;
            const uint32_t chunk = left < c_.warp_layout.chunk_bytes ? left : c_.warp_layout.chunk_bytes;
            stage.load(ctx_, source + first, chunk);
            stage.wait_loaded(ctx_, round_++);
            store_places(placement, stage, first, chunk);
            stage.wait_reusable(ctx_);
        }
    }
    // The leader. Bytes [first, first + chunk) of a row are in the stage.
    CROSSDOCK_DEVICE void store_places(const Placement& placement, const RowStage& stage, uint32_t first,
                                       uint32_t chunk) const {
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < *placement.num; ++i)
            stage.store(ctx_, args_.out_tokens + uint64_t{placement.rows[i]} * args_.row_bytes + first, 0, chunk);
        RowStage::end_group(ctx_);
    }

    const Op& op_;
    const DispatchSend<Op>& send_;
    const Ctx& ctx_;
    decltype(Op::args) args_;
    decltype(Op::c) c_;
    HeaderReader<Op> headers_;
    ScalePlacer<Op> scales_;
    uint32_t round_ = 0;  // loads of this warp's stage
};

}  // namespace
}  // namespace crossdock
