// SPDX-License-Identifier: Apache-2.0
// High-throughput combine, send half: the rows that came from a rank go back to it, one a token: a flat row as it is,
// expert-major rows of one token summed first. A home rank that may read the rows where they lie needs none of this.
#pragma once

#include "device/sum_rows.h"
#include "kernels/ht/dispatch_send.h"

namespace crossdock {
inline namespace CROSSDOCK_WORLD {

// Expert-major: the rows of a token here, null where dropped, into plan.rows.
CROSSDOCK_DEVICE void list_rows(const Ctx& ctx, const HtCombineArgs& args, uint32_t num, const HtPlan& plan) {
    const HtCommon& c = args.common;
    CROSSDOCK_ROLLED
    for (uint32_t i = static_cast<uint32_t>(ctx.lane()); i < num; i += kLanes) {
        const uint32_t slot = plan.slots[i];
        const bool is_here = slot < c.budget && slot < args.token_rows;
        plan.rows[i] = is_here ? args.tokens + uint64_t{slot} * args.row_bytes : nullptr;
    }
    ctx.warp_sync();
}

// The gradients of a row's weights, in ascending order of its experts, into its packet. One warp.
CROSSDOCK_DEVICE void return_weights(const Ctx& ctx, const HtCombineArgs& args, uint32_t num, uint32_t row_number,
                                     const HtPlan& plan, std::byte* packet) {
    const HtCommon& c = args.common;
    float* weights = reinterpret_cast<float*>(packet + args.packet.weights_at());
    CROSSDOCK_ROLLED
    for (uint32_t i = static_cast<uint32_t>(ctx.lane()); i < num; i += kLanes) {
        const uint64_t row = c.expert_major ? plan.slots[i] : row_number;
        const bool is_here = row < c.budget && row < args.token_rows;
        weights[i] = !is_here ? 0.0f : args.weights[c.expert_major ? row : row * c.topk + i];
    }
}

template <DType kDType>
CROSSDOCK_DEVICE void return_row(const Ctx& ctx, const HtCombineArgs& args, const Operation& operation, int home,
                                 uint32_t chunk, uint32_t bit, const ReceivedRow& row, const RowStage& stage,
                                 uint32_t& round) {
    const HtCommon& c = args.common;
    const uint32_t channel = static_cast<uint32_t>(ctx.block_idx());
    const HtPlan plan = HtPlan::of_warp(ctx, args.shared, c.topk);
    const Ring ring = Ring::of(c, home, c.rank, channel);
    const uint32_t slot = row.packet % args.packet.slots;
    std::byte* packet = ring.packets + uint64_t{slot} * args.packet.stride;
    uint32_t num = 0;
    if (c.expert_major || args.with_weights) num = list_experts(ctx, c, home, chunk, bit, plan);
    if (c.expert_major) list_rows(ctx, args, num, plan);
    const bool is_here = c.expert_major || row.number < args.token_rows;
    const bool has_credit =
        ctx.warp_broadcast(
            is_leader(ctx) && wait_credit(ctx, c, operation, home, channel, row.packet, args.packet.slots) ? 1u : 0u) !=
        0;
    if (!has_credit) return;
    if (is_leader(ctx)) note_packet_written(ctx, c, operation, home, ring, row.packet, args.packet.slots);
    CROSSDOCK_ROLLED
    for (uint32_t first = 0; is_here && first < args.row_bytes; first += args.crew.chunk_bytes) {
        const uint32_t left = args.row_bytes - first;
        const uint32_t part = left < args.crew.chunk_bytes ? left : args.crew.chunk_bytes;
        if (c.expert_major) {
            sum_rows<kDType>(ctx, PointerTerms{plan.rows, num}, first / dtype_bytes(kDType), part / dtype_bytes(kDType),
                             stage.data() - first);
            stage.filled();
        } else if (is_leader(ctx)) {
            stage.load(ctx, args.tokens + uint64_t{row.number} * args.row_bytes + first, part);
            stage.wait_loaded(ctx, round++);
        }
        ctx.warp_sync();
        if (is_leader(ctx)) {
            stage.store(ctx, packet + first, 0, part);
            stage.end_group(ctx);
            stage.wait_reusable(ctx);
        }
        ctx.warp_sync();
    }
    if (args.with_weights) return_weights(ctx, args, num, row.number, plan, packet);
    ctx.warp_sync();
    if (is_leader(ctx)) {
        RowStage::wait_stores(ctx);
        ctx.store_landed_system(ring.flags + slot, pack_word(operation.epoch, row.packet));
    }
    ctx.warp_sync();
}

template <DType kDType>
CROSSDOCK_DEVICE void return_rows(const Ctx& ctx, const HtCombineArgs& args, const Operation& operation) {
    const HtCommon& c = args.common;
    const RowStage stage = stage_of_warp(ctx, args.shared);
    const uint32_t channel = static_cast<uint32_t>(ctx.block_idx());
    const uint32_t num_ranks = c.arena.num_ranks;
    uint32_t round = 0;
    uint32_t most = 0;  // chunks of a home
    CROSSDOCK_ROLLED
    for (uint32_t home = 0; home < num_ranks; ++home) {
        const uint32_t size = ChunkRange::of(c.tables.source_tokens[home], channel, c.channels).size();
        most = size > most ? size : most;
    }
    CROSSDOCK_ROLLED
    for (uint32_t at = static_cast<uint32_t>(ctx.warp_idx()); at < most * kChunkTokens; at += args.crew.producers) {
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < num_ranks; ++i) {
            const uint32_t home = (static_cast<uint32_t>(c.rank) + i) % num_ranks;
            if (peer_states(ctx, args.shared)[home] != kEntered) continue;
            const ChunkRange range = ChunkRange::of(c.tables.source_tokens[home], channel, c.channels);
            const uint32_t chunk = range.first + at / kChunkTokens;
            if (chunk >= range.end) continue;
            const ReceivedRow row = received_row(c, static_cast<int>(home), chunk, at % kChunkTokens, range);
            if (!row.exists || !travels(c, row.number)) continue;
            return_row<kDType>(ctx, args, operation, static_cast<int>(home), chunk, at % kChunkTokens, row, stage,
                               round);
        }
    }
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
