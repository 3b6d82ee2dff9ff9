// SPDX-License-Identifier: Apache-2.0
// High-throughput combine, send half: rows return to their source ranks, a packet per token: a flat row unchanged, the
// sum of expert-major rows, or these rows one by one (HtWire::kChoices). Not used for source ranks that read the rows
// in place.
#pragma once

#include "device/row_copy.h"
#include "device/sum_rows.h"
#include "kernels/ht/combine_rows.h"
#include "kernels/ht/flags.h"
#include "kernels/ht/row_batches.h"

namespace crossdock {
namespace {

// Common to flat and expert-major rows: packets in the source ranks' rings, and their flags. The leader stores rows.
class Returns {
  public:
    // sender: the warp's number among those that return rows.
    CROSSDOCK_DEVICE Returns(const HtCombineArgs& args, const Operation& operation, uint32_t sender)
        : args_(args), operation_(operation), flag_(args.warp_layout, args.shared, sender) {}

    // Waits for a free slot for the row's packet, and raises the pending flag first. Returns false if its source rank
    // is lost.
    CROSSDOCK_DEVICE bool wait_for_slot(const Ctx& ctx, const PlannedRow& row) {
        return wait_for_slot(ctx, row, 1, args_.wire_bytes);
    }
    // rows, bytes: of the packet.
    CROSSDOCK_DEVICE bool wait_for_slot(const Ctx& ctx, const PlannedRow& row, uint32_t rows, uint64_t bytes) {
        ctx.enter(Phase::kCombineSlot);
        bool may_send = false;
        if (is_leader(ctx)) {
            const LsaRing ring = ring_of(ctx, row);
            if (!ring.has_credit(ctx, operation_, args_.rows, row.packet)) raise(ctx);
            may_send = ring.wait_credit(ctx, operation_, args_.rows, row.packet);
            if (may_send) count_rows(ctx, args_.common.reach, agent_of(args_.common, row.peer), rows, bytes);
        }
        return ctx.warp_broadcast(may_send ? 1u : 0u) != 0;
    }

    CROSSDOCK_DEVICE std::byte* packet_of(const Ctx& ctx, const PlannedRow& row) const {
        return ring_of(ctx, row).packet(args_.rows, row.packet);
    }

    // Call when the stores of the row's last bytes are issued.
    CROSSDOCK_DEVICE void add(const Ctx& ctx, const PlannedRow& row) {
        if (is_leader(ctx)) {
            raise(ctx);
            flag_.set(row.peer, row.packet);
        }
        ctx.warp_sync();
    }
    // The leader: the flag of the row before, if it is pending. later_groups: of stores that have been issued since.
    CROSSDOCK_DEVICE void raise(const Ctx& ctx, int later_groups = 0) {
        flag_.raise_own(ctx, args_.common, operation_, args_.rows, later_groups);
    }
    // Behind the last row.
    CROSSDOCK_DEVICE void end(const Ctx& ctx) {
        if (is_leader(ctx)) raise(ctx);
        flag_.end(ctx);
    }

  private:
    CROSSDOCK_DEVICE LsaRing ring_of(const Ctx& ctx, const PlannedRow& row) const {
        return LsaRing::combine_to(args_.common, row.peer, ctx.block_idx());
    }

    const HtCombineArgs& args_;
    const Operation& operation_;
    PendingFlag flag_;
};

// One warp. The number of rows that this block returns, expert-major.
CROSSDOCK_DEVICE uint32_t num_returned_rows(const Ctx& ctx, const HtCombineArgs& args) {
    const HtCommon& c = args.common;
    uint32_t num = 0;
    CROSSDOCK_ROLLED
    for (uint32_t peer = ctx.lane(); peer < c.arena.num_ranks; peer += kLanes) {
        if (peer_states(ctx, args.shared)[peer] != kEntered) continue;
        num += num_received(c, peer, token_share(c, peer, ctx.block_idx()));
    }
    return ctx.warp_sum(num);
}

CROSSDOCK_DEVICE RowSequence returned_rows(const Ctx& ctx, const HtCombineArgs& args) {
    return {ctx.warp_idx(), args.warp_layout.producers, false, false, args.token_rows};
}

// Rows return to their source ranks unchanged, through the warp's stages: flat ones, or those of choices.
template <HtWire kWire, typename Args>
class RowReturner {
  public:
    CROSSDOCK_DEVICE RowReturner(const Ctx& ctx, const Args& args, const Operation& operation)
        : args_(args),
          rows_(ctx, args.common, args.shared, returned_rows(ctx, args)),
          returns_(args, operation, ctx.warp_idx()) {}

    CROSSDOCK_DEVICE void run(const Ctx& ctx) {
        CROSSDOCK_ROLLED
        for (const PlannedRow* row = rows_.next(ctx); row != nullptr; row = rows_.next(ctx)) {
            const bool may_send = wait_for_slot(ctx, *row);
            if (const RowStage::Lead lead{ctx}; lead) copy_staged(ctx, *row, may_send);
            ctx.warp_sync();
            if constexpr (kWire == HtWire::kChoices) {
                if (may_send) complete(ctx, *row);
            }
            if constexpr (kIsElastic<Args>) {
                if (may_send) return_words(ctx, args_, *row, returns_.packet_of(ctx, *row) + words_begin<kWire>(args_));
            }
            if (may_send) returns_.add(ctx, *row);
        }
        returns_.end(ctx);
        RowStage::wait_stores(ctx);
    }

  private:
    // A part of one of a packet's rows, which passes a stage. row null: none.
    struct Part {
        const PlannedRow* row;
        uint32_t index;  // of the row in its packet
        uint32_t first;  // byte of the row
    };

    CROSSDOCK_DEVICE RowStage stage(const Ctx& ctx, uint32_t round) const {
        return stage_of_warp(ctx, args_.warp_layout, args_.shared, round % args_.warp_layout.producer_stages);
    }
    CROSSDOCK_DEVICE uint32_t bytes_of(const Part& part) const {
        const uint32_t left = args_.row_bytes - part.first;
        return left < args_.warp_layout.chunk_bytes ? left : args_.warp_layout.chunk_bytes;
    }
    CROSSDOCK_DEVICE const std::byte* source_of(const Part& part) const {
        const uint32_t slot = kWire == HtWire::kChoices ? rows_.slots(*part.row)[part.index] : part.row->number;
        return args_.tokens + uint64_t{slot} * args_.row_bytes + part.first;
    }

    CROSSDOCK_DEVICE std::byte* row_in_packet(const Ctx& ctx, const PlannedRow& row, uint32_t index) const {
        return returns_.packet_of(ctx, row) + rows_begin<kWire>(args_) + index * args_.row_bytes;
    }

    CROSSDOCK_DEVICE bool wait_for_slot(const Ctx& ctx, const PlannedRow& row) {
        if constexpr (kWire != HtWire::kChoices) return returns_.wait_for_slot(ctx, row);
        return returns_.wait_for_slot(
            ctx, row, row.num_slots,
            rows_begin<kWire>(args_) + uint64_t{row.num_slots} * args_.row_bytes + kRowCountBytes);
    }

    // The first part of a packet's rows from `index` on.
    CROSSDOCK_DEVICE Part first_part(const PlannedRow* row, uint32_t index) const {
        if constexpr (kWire == HtWire::kChoices) {
            while (row != nullptr && index < row->num_slots && rows_.slots(*row)[index] == kNoSlot) ++index;
        }
        return row != nullptr && index < row->num_slots ? Part{row, index, 0} : Part{nullptr, 0, 0};
    }
    // The part of the same packet behind that one.
    CROSSDOCK_DEVICE Part next_part(const Part& part) const {
        const uint32_t end = part.first + args_.warp_layout.chunk_bytes;
        if (end < args_.row_bytes) return {part.row, part.index, end};
        if constexpr (kWire == HtWire::kChoices) return first_part(part.row, part.index + 1);
        return {nullptr, 0, 0};
    }

    // The leader. Loads the next part into its stage while the previous part is sent.
    CROSSDOCK_DEVICE void copy_staged(const Ctx& ctx, const PlannedRow& row, bool may_send) {
        ctx.enter(Phase::kCombineStore);
        CROSSDOCK_ROLLED
        for (Part part = first_part(&row, 0); part.row != nullptr;) {
            if (!is_begun_) load(ctx, part, round_);
            const Part next = next_part(part);
            const Part loaded = next.row != nullptr ? next : first_part(rows_.peek(), 0);
            is_begun_ = args_.warp_layout.producer_stages > 1 && loaded.row != nullptr;
            if (is_begun_) load(ctx, loaded, round_ + 1);
            const RowStage from = stage(ctx, round_);
            from.wait_loaded(ctx, round_ / args_.warp_layout.producer_stages);
            if (may_send) from.store(ctx, row_in_packet(ctx, row, part.index) + part.first, 0, bytes_of(part), true);
            RowStage::end_group(ctx);
            if (part.index == 0 && part.first == 0) returns_.raise(ctx, 1);
            ++round_;
            part = next;
        }
    }

    CROSSDOCK_DEVICE void load(const Ctx& ctx, const Part& part, uint32_t round) const {
        const RowStage to = stage(ctx, round);
        to.wait_reusable(ctx);
        to.load(ctx, source_of(part), bytes_of(part));
    }

    // The whole warp. Zeros for the rows that have no place, and the index of the last row.
    CROSSDOCK_DEVICE void complete(const Ctx& ctx, const PlannedRow& row) const {
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < row.num_slots; ++i) {
            if (rows_.slots(row)[i] == kNoSlot) zero_row(ctx, row_in_packet(ctx, row, i), args_.row_bytes);
        }
        if (is_leader(ctx)) *last_row_of(args_, returns_.packet_of(ctx, row)) = row.num_slots - 1;
        ctx.warp_sync();
    }

    const Args& args_;
    RowBatches<kWire == HtWire::kChoices ? Places::kOfChoices : Places::kByExpert> rows_;
    Returns returns_;
    uint32_t round_ = 0;     // of the stages
    bool is_begun_ = false;  // the next load is issued; known to the leader
};

// Expert-major with a single warp (CPUs): it sums the rows of a token into a stage and sends the sum.
template <DType kDType, HtWire kWire, typename Args>
class SumReturner {
  public:
    CROSSDOCK_DEVICE SumReturner(const Ctx& ctx, const Args& args, const Operation& operation)
        : args_(args),
          rows_(ctx, args.common, args.shared, returned_rows(ctx, args)),
          returns_(args, operation, ctx.warp_idx()),
          plan_(HtPlan::of_warp(ctx, args.shared, args.common.topk)) {}

    CROSSDOCK_DEVICE void run(const Ctx& ctx) {
        CROSSDOCK_ROLLED
        for (const PlannedRow* row = rows_.next(ctx); row != nullptr; row = rows_.next(ctx)) {
            CROSSDOCK_ROLLED
            for (uint32_t i = ctx.lane(); i < row->num_slots; i += kLanes)
                plan_.rows[i] = args_.tokens + uint64_t{rows_.slots(*row)[i]} * args_.row_bytes;
            const bool may_send = returns_.wait_for_slot(ctx, *row);
            std::byte* const packet = returns_.packet_of(ctx, *row);
            CROSSDOCK_ROLLED
            for (uint32_t first = 0; first < args_.row_bytes; first += args_.warp_layout.chunk_bytes)
                send(ctx, {plan_.rows, row->num_slots}, first, may_send ? packet : nullptr);
            if constexpr (kIsElastic<Args>) {
                if (may_send) return_words(ctx, args_, *row, packet + words_begin<kWire>(args_));
            }
            if (may_send) returns_.add(ctx, *row);
        }
        returns_.end(ctx);
        RowStage::wait_stores(ctx);
    }

  private:
    CROSSDOCK_DEVICE void send(const Ctx& ctx, const PointerSummands& summands, uint32_t first, std::byte* packet) {
        const uint32_t left = args_.row_bytes - first;
        const uint32_t bytes = left < args_.warp_layout.chunk_bytes ? left : args_.warp_layout.chunk_bytes;
        const RowStage stage =
            stage_of_warp(ctx, args_.warp_layout, args_.shared, round_++ % args_.warp_layout.producer_stages);
        ctx.enter(Phase::kCombineStage);
        stage.wait_reusable(ctx);
        ctx.warp_sync();
        ctx.enter(Phase::kCombineSum);
        sum_rows<kDType>(ctx, summands, first / dtype_bytes(kDType), bytes / dtype_bytes(kDType), stage.data() - first);
        const uint32_t chunk = args_.warp_layout.chunk_bytes;
        const uint32_t at = quantise_part<kWire>(ctx, stage.data(), bytes, chunk);
        stage.filled();
        ctx.warp_sync();
        ctx.enter(Phase::kCombineStore);
        const RowStage::Lead lead(ctx);
        if (!lead) return;
        if (packet != nullptr)
            stage.store(ctx, packet + first / chunk * args_.wire_part, at, wire_bytes(kWire, bytes), true);
        RowStage::end_group(ctx);
    }

    const Args& args_;
    RowBatches<kPlacesOfSum<Args>> rows_;
    Returns returns_;
    HtPlan plan_;
    uint32_t round_ = 0;  // of the stages
};

}  // namespace
}  // namespace crossdock
