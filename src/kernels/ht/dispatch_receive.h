// SPDX-License-Identifier: Apache-2.0
// High-throughput dispatch, receive half: a warp takes a packet, copies the row to its slots, and returns the credit.
// It reads rows of ranks whose tokens are in windows where they are, and needs no packet for them. For rows that peers
// store to their slots directly, only routing weights and expert ids are received.
#pragma once

#include "device/row_copy.h"
#include "kernels/ht/dispatch_send.h"
#include "kernels/ht/dispatch_weights.h"
#include "kernels/ht/row_batches.h"

namespace crossdock {
namespace {

// One warp. Writes zeros to a row of the tensors.
CROSSDOCK_DEVICE void zero_slot(const Ctx& ctx, const HtDispatchArgs& args, uint64_t row) {
    zero_row(ctx, args.out_tokens + row * args.row_bytes, args.row_bytes);
    if (args.scale_bytes > 0) zero_scales(ctx, args.out_scales + row * args.scale_bytes, args.scale_bytes);
}

// The same to several. One warp.
CROSSDOCK_DEVICE void zero_slots(const Ctx& ctx, const HtDispatchArgs& args, const uint32_t* slots, uint32_t num) {
    CROSSDOCK_ROLLED
    for (uint32_t i = 0; i < num; ++i) zero_slot(ctx, args, slots[i]);
}

// Copies rows to their slots, in the order of tokens.
template <typename Args>
class RowReceiver {
  public:
    // warp: among the `warps` of this block that receive.
    CROSSDOCK_DEVICE RowReceiver(const Ctx& ctx, const Args& args, const Operation& operation, uint32_t warp,
                                 uint32_t warps)
        : args_(args),
          operation_(operation),
          rows_(ctx, args.common, args.shared, {warp, warps, true, true, args.token_rows}),
          publisher_(ctx, args) {}

    CROSSDOCK_DEVICE void run(const Ctx& ctx) {
        if (!args_.common.windows_are_inputs && are_all_direct(ctx, args_.common, args_.shared)) return;
        CROSSDOCK_ROLLED
        for (const PlannedRow* row = rows_.next(ctx); row != nullptr; row = rows_.next(ctx)) receive(ctx, *row);
        RowStage::wait_stores(ctx);
    }

  private:
    CROSSDOCK_DEVICE LsaRing ring_of(const Ctx& ctx, const PlannedRow& row) const {
        return LsaRing::dispatch_from(args_.common, row.peer, ctx.block_idx());
    }
    CROSSDOCK_DEVICE const std::byte* packet_of(const Ctx& ctx, const PlannedRow& row) const {
        return ring_of(ctx, row).packet(args_.rows, row.packet);
    }

    // The source rank's own tensors, not a packet.
    CROSSDOCK_DEVICE bool is_read_in_place(const Ctx& ctx, const PlannedRow& row) const {
        return !kIsElastic<Args> && peer_states(ctx, args_.shared)[row.peer] == kReadable;
    }
    CROSSDOCK_DEVICE bool wait_row(const Ctx& ctx, const PlannedRow& row) const {
        if (!is_read_in_place(ctx, row)) return ring_of(ctx, row).wait_packet(ctx, operation_, args_.rows, row.packet);
        return row.peer != args_.common.rank || token_of(row) < args_.common.num_tokens;
    }
    CROSSDOCK_DEVICE const std::byte* row_of(const Ctx& ctx, const PlannedRow& row) const {
        if (!is_read_in_place(ctx, row)) return packet_of(ctx, row);
        return args_.token_windows.at(row.peer, uint64_t{token_of(row)} * args_.row_bytes);
    }
    CROSSDOCK_DEVICE const std::byte* scales_of(const Ctx& ctx, const PlannedRow& row) const {
        if (!is_read_in_place(ctx, row)) return packet_of(ctx, row) + args_.row_bytes;
        return args_.scale_windows.at(row.peer, uint64_t{token_of(row)} * args_.scale_bytes);
    }
    static CROSSDOCK_DEVICE uint32_t token_of(const PlannedRow& row) { return row.chunk * kChunkTokens + row.bit; }

    // From its packet if that arrives, else zeros; elastic operations fail without it, and leave the slots alone.
    CROSSDOCK_DEVICE void receive(const Ctx& ctx, const PlannedRow& row) {
        const uint32_t* slots = rows_.slots(row);
        const bool is_here = is_leader(ctx) && wait_row(ctx, row);
        if (ctx.warp_broadcast(is_here ? 1u : 0u) == 0) {
            if constexpr (!kIsElastic<Args>) zero_slots(ctx, args_, slots, row.num_slots);
            publisher_.publish(ctx, slots, row.num_slots, false);
            return ctx.warp_sync();
        }
        if (!kIsElastic<Args> && args_.scale_bytes > 0) {
            copy_scales(ctx, scales_of(ctx, row), args_.scale_bytes, row.num_slots,
                        [&](uint32_t i) { return args_.out_scales + uint64_t{slots[i]} * args_.scale_bytes; });
        }
        const auto slot = [&](uint32_t i) { return args_.out_tokens + uint64_t{slots[i]} * args_.row_bytes; };
        const std::byte* words = nullptr;
        if constexpr (kIsElastic<Args>) {
            words = copy_with_words(ctx, row, slot);
        } else if (args_.warp_layout.consumer_stages > 0) {
            if (const RowStage::Lead lead{ctx}) copy_staged(ctx, row, slot);
        } else {
            copy_row(ctx, row_of(ctx, row), args_.row_bytes, row.num_slots, slot);
        }
        wait_row_copies(ctx);
        if (is_leader(ctx) && !is_read_in_place(ctx, row))
            ring_of(ctx, row).give_credit(ctx, operation_, args_.rows, row.packet);
        publisher_.publish(ctx, slots, row.num_slots, is_leader(ctx));
        if constexpr (kIsElastic<Args>) {
            place_words(ctx, args_, row.peer, token_of(row), row.number, words, slots, row.num_slots);
        }
        ctx.warp_sync();
    }

    // Through the warp's stage. The leader.
    template <typename Slot>
    CROSSDOCK_DEVICE void copy_staged(const Ctx& ctx, const PlannedRow& row, Slot slot) {
        const RowStage stage = stage_of_warp(ctx, args_.warp_layout, args_.shared, 0);
        const std::byte* const source = row_of(ctx, row);
        ctx.fence_async_copies();  // the flag was read by an ordinary load, the row is read by an asynchronous copy
        CROSSDOCK_ROLLED
        for (uint32_t first = 0; first < args_.row_bytes; first += args_.warp_layout.chunk_bytes) {
            const uint32_t left = args_.row_bytes - first;
            const uint32_t bytes = left < args_.warp_layout.chunk_bytes ? left : args_.warp_layout.chunk_bytes;
            stage.wait_reusable(ctx);
            stage.load(ctx, source + first, bytes);
            stage.wait_loaded(ctx, round_++);
            CROSSDOCK_ROLLED
            for (uint32_t i = 0; i < row.num_slots; ++i) stage.store(ctx, slot(i) + first, 0, bytes);
            RowStage::end_group(ctx);
        }
        stage.release_source(ctx);
    }

    // Elastic. The same by the whole warp. Returns the words behind the row, in the stage: to be placed while the
    // stores go on, by loads that wait for nothing.
    template <typename Slot>
    CROSSDOCK_DEVICE const std::byte* copy_with_words(const Ctx& ctx, const PlannedRow& row, Slot slot) {
        const RowStage stage = stage_of_warp(ctx, args_.warp_layout, args_.shared, 0);
        const std::byte* const packet = packet_of(ctx, row);
        const std::byte* words = nullptr;
        if (is_leader(ctx)) ctx.fence_async_copies();
        CROSSDOCK_ROLLED
        for (uint32_t first = 0; words == nullptr; first += args_.warp_layout.chunk_bytes) {
            ctx.warp_sync();  // no lane waits for an earlier load than the others
            const uint32_t left = args_.row_bytes - first;
            const bool is_last = left <= args_.warp_layout.chunk_bytes;
            const uint32_t bytes = is_last ? left : args_.warp_layout.chunk_bytes;
            if (const RowStage::Lead lead{ctx}) {
                stage.wait_reusable(ctx);
                stage.load(ctx, packet + first, bytes, packet + args_.row_bytes, is_last ? args_.scale_bytes : 0);
            }
            stage.wait_loaded(ctx, round_++);
            if (is_last) words = stage.data() + bytes;
            const RowStage::Lead lead(ctx);
            if (!lead) continue;
            CROSSDOCK_ROLLED
            for (uint32_t i = 0; i < row.num_slots; ++i) stage.store(ctx, slot(i) + first, 0, bytes);
            RowStage::end_group(ctx);
        }
        if (is_leader(ctx)) stage.release_source(ctx);
        return words;
    }

    const Args& args_;
    const Operation& operation_;
    RowBatches<> rows_;
    uint32_t round_ = 0;  // loads of the stage
    PublisherOf<Args> publisher_;
};

// All receiving warps of the grid. Fills the padding rows of experts' zones, and weights and ids after the last row.
CROSSDOCK_DEVICE void fill_gaps(const Ctx& ctx, const HtDispatchArgs& args, uint32_t warp, uint32_t warps) {
    const HtCommon& c = args.common;
    const HtTables& t = c.tables;
    CROSSDOCK_ROLLED
    for (uint32_t expert = 0; c.expert_major && expert < c.arena.experts_per_rank; ++expert) {
        const uint32_t end = t.zones[expert + 1] < c.budget ? t.zones[expert + 1] : c.budget;
        CROSSDOCK_ROLLED
        for (uint32_t slot = t.zones[expert] + t.expert_rows[expert] + warp; slot < end; slot += warps) {
            if (slot < args.token_rows) zero_slot(ctx, args, slot);
            if (args.with_weights && slot < args.weight_rows && is_leader(ctx)) args.out_weights[slot] = 0.0f;
        }
    }
    if (!args.with_weights) return;
    const uint64_t end = args.weight_rows < c.budget ? args.weight_rows : c.budget;
    const uint64_t thread = uint64_t{warp} * kLanes + ctx.lane();
    const uint64_t threads = uint64_t{warps} * kLanes;
    const uint64_t per_row = c.expert_major ? 1 : c.topk;
    CROSSDOCK_ROLLED
    for (uint64_t i = t.routing->total * per_row + thread; i < end * per_row; i += threads) {
        args.out_weights[i] = 0.0f;
        if (!c.expert_major) args.out_topk_idx[i] = -1;
    }
}

// One block, after all others. Writes zeros to all rows of ranks that are masked now: some blocks may have received
// rows before the rank was lost, others none.
CROSSDOCK_DEVICE_RARE void clear_lost_rows(const Ctx& ctx, const HtDispatchArgs& args) {
    const HtCommon& c = args.common;
    const HtTables& t = c.tables;
    const HtPlan plan = HtPlan::of_warp(ctx, args.shared, c.topk);
    CROSSDOCK_ROLLED
    for (uint32_t source = 0; source < c.arena.num_ranks; ++source) {
        if (is_active(ctx, c.scope, source)) continue;
        const Share all{0, t.source_tokens[source]};
        CROSSDOCK_ROLLED
        for (uint32_t at = ctx.warp_idx(); at < all.end; at += ctx.num_warps()) {
            const uint32_t chunk = at / kChunkTokens;
            const uint32_t bit = at % kChunkTokens;
            const ReceivedRow row = received_row(c, source, at, all);
            if (!row.exists || !travels(c, row.number)) continue;
            const uint32_t num = list_slots(ctx, c, source, chunk, bit, row.number, args.token_rows, plan.slots);
            ctx.warp_sync();
            zero_slots(ctx, args, plan.slots, num);
            if (args.with_weights && is_leader(ctx)) store_routing(args, source, chunk, bit, row.number, nullptr);
            ctx.warp_sync();
        }
    }
}

}  // namespace
}  // namespace crossdock
