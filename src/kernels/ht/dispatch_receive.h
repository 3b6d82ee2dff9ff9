// SPDX-License-Identifier: Apache-2.0
// High-throughput dispatch, receive half: a warp takes a packet, brings what it holds to its rows, and gives the slot
// back. Rows that peers write themselves need only their labels.
#pragma once

#include "device/row_copy.h"
#include "kernels/ht/dispatch_send.h"
#include "kernels/ht/update.h"

namespace crossdock {
inline namespace CROSSDOCK_WORLD {

// A flat row's local experts and weights, ascending, then -1 and 0. One warp.
CROSSDOCK_DEVICE void label_flat_row(const Ctx& ctx, const HtDispatchArgs& args, uint64_t row, uint32_t num,
                                     const int32_t* experts, const float* weights) {
    const HtCommon& c = args.common;
    const int64_t first_expert =
        args.global_ids ? int64_t{c.rank} * static_cast<int64_t>(c.arena.experts_per_rank) : int64_t{0};
    CROSSDOCK_ROLLED
    for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < c.topk; k += kLanes) {
        args.out_topk_idx[row * c.topk + k] = k < num ? first_expert + experts[k] : int64_t{-1};
        args.out_weights[row * c.topk + k] = k < num && weights != nullptr ? weights[k] : 0.0f;
    }
}

// One row of a source, from its packet, if that comes, into all of its places; zeros otherwise. One warp.
CROSSDOCK_DEVICE void receive_row(const Ctx& ctx, const HtDispatchArgs& args, const Operation& operation, int source,
                                  uint32_t chunk, uint32_t bit, const ReceivedRow& row) {
    const HtCommon& c = args.common;
    const uint32_t channel = static_cast<uint32_t>(ctx.block_idx());
    const HtPlan plan = HtPlan::of_warp(ctx, args.shared, c.topk);
    const HtPacket& packet = packet_with(ctx, args, source);
    const uint32_t num = args.is_labelled || c.expert_major ? list_experts(ctx, c, source, chunk, bit, plan) : 0;
    const Ring ring = Ring::of(c, c.rank, source, channel);
    const bool came =
        ctx.warp_broadcast(
            is_leader(ctx) && wait_packet(ctx, c, operation, source, ring, row.packet, packet.slots) ? 1u : 0u) != 0;
    const std::byte* in_ring = ring.packets + uint64_t{row.packet % packet.slots} * packet.stride;
    const float* weights = came ? reinterpret_cast<const float*>(in_ring + packet.weights_at()) : nullptr;
    if (args.is_labelled && !c.expert_major && row.number < args.label_rows)
        label_flat_row(ctx, args, row.number, num, plan.experts, weights);

    // Expert-major: a place for every local expert within budget and tensors.
    uint32_t num_places = 1;
    if (c.expert_major) {
        num_places = 0;
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < num; ++i) {
            const uint32_t slot = plan.slots[i];
            if (slot >= c.budget) continue;
            if (is_leader(ctx) && args.is_labelled && slot < args.label_rows)
                args.out_weights[slot] = weights != nullptr ? weights[i] : 0.0f;
            if (slot >= args.token_rows) continue;
            if (is_leader(ctx)) plan.ids[num_places] = static_cast<int32_t>(slot);
            ++num_places;
        }
        ctx.warp_sync();
    } else if (row.number >= args.token_rows) {
        num_places = 0;
    }
    const auto place_in = [&](std::byte* tensor, uint32_t bytes, uint32_t i) {
        const uint64_t at = c.expert_major ? static_cast<uint32_t>(plan.ids[i]) : row.number;
        return tensor + at * bytes;
    };
    const auto bring = [&](std::byte* tensor, const std::byte* part, uint32_t bytes) {
        if (came) {
            copy_row(ctx, part, bytes, num_places, [&](uint32_t i) { return place_in(tensor, bytes, i); });
        } else {
            for (uint32_t i = 0; i < num_places; ++i) zero_row(ctx, place_in(tensor, bytes, i), bytes);
        }
    };
    if (packet.row_bytes > 0 || !came) bring(args.out_tokens, in_ring, args.row_bytes);
    if (args.scale_bytes > 0 && (packet.scale_bytes > 0 || !came))
        bring(args.out_scales, in_ring + packet.scales_at(), args.scale_bytes);
    wait_row_copies(ctx);
    if (came && is_leader(ctx)) give_credit(ctx, c, operation, source, channel, ring, row.packet, packet.slots);
}

// Rows of experts' zones that nobody sends, and labels behind the last row. All receiving warps of the grid.
CROSSDOCK_DEVICE void fill_gaps(const Ctx& ctx, const HtDispatchArgs& args, uint32_t warp, uint32_t warps) {
    const HtCommon& c = args.common;
    const HtTables& t = c.tables;
    CROSSDOCK_ROLLED
    for (uint32_t expert = 0; c.expert_major && expert < c.arena.experts_per_rank; ++expert) {
        const uint32_t end = t.zones[expert + 1] < c.budget ? t.zones[expert + 1] : c.budget;
        CROSSDOCK_ROLLED
        for (uint32_t slot = t.zones[expert] + t.expert_rows[expert] + warp; slot < end; slot += warps) {
            if (slot < args.token_rows) {
                zero_row(ctx, args.out_tokens + uint64_t{slot} * args.row_bytes, args.row_bytes);
                if (args.scale_bytes > 0)
                    zero_row(ctx, args.out_scales + uint64_t{slot} * args.scale_bytes, args.scale_bytes);
            }
            if (args.is_labelled && slot < args.label_rows && is_leader(ctx)) args.out_weights[slot] = 0.0f;
        }
    }
    if (!args.is_labelled) return;
    const uint64_t end = args.label_rows < c.budget ? args.label_rows : c.budget;
    const uint64_t thread = uint64_t{warp} * kLanes + static_cast<uint32_t>(ctx.lane());
    const uint64_t threads = uint64_t{warps} * kLanes;
    const uint64_t per_row = c.expert_major ? 1 : c.topk;
    CROSSDOCK_ROLLED
    for (uint64_t i = t.routing->total * per_row + thread; i < end * per_row; i += threads) {
        args.out_weights[i] = 0.0f;
        if (!c.expert_major) args.out_topk_idx[i] = -1;
    }
}

// warp: among the `warps` of this block that receive.
CROSSDOCK_DEVICE void receive_tokens(const Ctx& ctx, const HtDispatchArgs& args, const Operation& operation,
                                     uint32_t warp, uint32_t warps) {
    const HtCommon& c = args.common;
    const uint32_t channel = static_cast<uint32_t>(ctx.block_idx());
    const uint32_t num_ranks = c.arena.num_ranks;
    uint32_t most = 0;  // chunks of a source
    CROSSDOCK_ROLLED
    for (uint32_t source = 0; source < num_ranks; ++source) {
        const uint32_t size = ChunkRange::of(c.tables.source_tokens[source], channel, c.channels).size();
        most = size > most ? size : most;
    }
    CROSSDOCK_ROLLED
    for (uint32_t at = warp; at < most * kChunkTokens; at += warps) {
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < num_ranks; ++i) {
            const uint32_t source = (static_cast<uint32_t>(c.rank) + i) % num_ranks;
            const ChunkRange range = ChunkRange::of(c.tables.source_tokens[source], channel, c.channels);
            const uint32_t chunk = range.first + at / kChunkTokens;
            if (chunk >= range.end) continue;
            const ReceivedRow row = received_row(c, static_cast<int>(source), chunk, at % kChunkTokens, range);
            if (!row.exists || !travels(c, row.number)) continue;
            receive_row(ctx, args, operation, static_cast<int>(source), chunk, at % kChunkTokens, row);
        }
    }
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
