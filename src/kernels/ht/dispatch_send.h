// SPDX-License-Identifier: Apache-2.0
// High-throughput dispatch, send half: a warp takes a token, loads its row once, and stores it to every rank that hosts
// one of its experts: straight into the receiver's tensors where those are windows, else into a packet of its ring.
//
// Whoever waits in here, and in the other three halves, works in the order of tokens within its channel, and waits only
// for what comes earlier in that order. So there is always somebody who can go on, however small the rings are.
#pragma once

#include "kernels/ht/operation.h"

namespace crossdock {
inline namespace CROSSDOCK_WORLD {

CROSSDOCK_DEVICE RowStage stage_of_warp(const Ctx& ctx, const HtShared& shared) {
    return RowStage(ctx.shared_memory() + shared.stages + shared.stage_bytes * static_cast<uint32_t>(ctx.warp_idx()));
}

// Followed by a barrier of the block.
CROSSDOCK_DEVICE void init_stage(const Ctx& ctx, const HtCrew& crew, const HtShared& shared) {
    if (ctx.warp_idx() < static_cast<int>(crew.producers) && is_leader(ctx)) {
        stage_of_warp(ctx, shared).init();
        RowStage::initialised();
    }
}

CROSSDOCK_DEVICE uint32_t* peer_states(const Ctx& ctx, const HtShared& shared) {
    return reinterpret_cast<uint32_t*>(ctx.shared_memory() + shared.peers);
}

CROSSDOCK_DEVICE const HtPacket& packet_with(const Ctx& ctx, const HtDispatchArgs& args, int peer) {
    return args.packets[peer_states(ctx, args.shared)[peer] == kDirect ? 1 : 0];
}

// The weights of a token's choices at a peer, in ascending order of its experts, into a packet. One lane.
CROSSDOCK_DEVICE void send_weights(const HtDispatchArgs& args, const HtPlan& plan, uint32_t num, int peer,
                                   std::byte* target) {
    const int32_t experts = static_cast<int32_t>(args.common.arena.experts_per_rank);
    float* weights = reinterpret_cast<float*>(target);
    uint32_t at = 0;
    CROSSDOCK_ROLLED
    for (uint32_t i = experts_below(plan, num, peer * experts); i < num && plan.experts[i] < (peer + 1) * experts; ++i)
        weights[at++] = plan.weights[i];
}

// What a lane keeps of its peer while a token's row passes.
struct Target {
    bool exists;
    uint64_t flag;  // the packet's number
    uint64_t* flag_word;
    std::byte* row;
    std::byte* scales;
    std::byte* weights;
};

CROSSDOCK_DEVICE Target target_at(const Ctx& ctx, const HtDispatchArgs& args, const Operation& operation, int peer,
                                  const ChunkRange& range, uint32_t chunk, uint32_t bit) {
    const HtCommon& c = args.common;
    Target target{};
    const uint32_t state = peer_states(ctx, args.shared)[peer];
    if (state == kAbsent) return target;
    const SentRow sent = sent_row(c, peer, chunk, bit, range);
    if (!sent.exists) return target;
    const HtPacket& packet = packet_with(ctx, args, peer);
    const uint32_t number = c.tables.bases[peer] + sent.number;
    const uint32_t channel = static_cast<uint32_t>(ctx.block_idx());
    if (!travels(c, number) || !wait_credit(ctx, c, operation, peer, channel, sent.packet, packet.slots)) return target;
    const Ring ring = Ring::of(c, peer, c.rank, channel);
    const uint32_t slot = sent.packet % packet.slots;
    std::byte* in_ring = ring.packets + uint64_t{slot} * packet.stride;
    note_packet_written(ctx, c, operation, peer, ring, sent.packet, packet.slots);
    target.exists = true;
    target.flag = pack_word(operation.epoch, sent.packet);
    target.flag_word = ring.flags + slot;
    target.row = in_ring;
    target.scales = in_ring + packet.scales_at();
    target.weights = in_ring + packet.weights_at();
    if (state == kDirect) {
        target.row = args.token_windows.at(peer, uint64_t{number} * args.row_bytes);
        target.scales = args.scale_windows.at(peer, uint64_t{number} * args.scale_bytes);
    }
    return target;
}

// All peers of a token, a lane a peer.
CROSSDOCK_DEVICE void send_token(const Ctx& ctx, const HtDispatchArgs& args, const Operation& operation,
                                 const ChunkRange& range, uint32_t chunk, uint32_t bit, const RowStage& stage,
                                 uint32_t& round) {
    const HtCommon& c = args.common;
    const uint32_t token = chunk * kChunkTokens + bit;
    const HtPlan plan = HtPlan::of_warp(ctx, args.shared, c.topk);
    uint32_t num = 0;
    const bool is_given = token < c.num_tokens;  // a handle over another's memory may be told of fewer tokens
    const bool has_weights = args.is_labelled && is_given;
    if (has_weights) {
        num = sort_choices(ctx, c, token, plan);
        // Of equal choices the last one counts.
        CROSSDOCK_ROLLED
        for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < c.topk; k += kLanes) {
            bool is_last = plan.slots[k] < c.topk;
            CROSSDOCK_ROLLED
            for (uint32_t j = k + 1; is_last && j < c.topk; ++j) is_last = plan.ids[j] != plan.ids[k];
            if (is_last) plan.weights[plan.slots[k]] = args.topk_weights[uint64_t{token} * c.topk + k];
        }
        ctx.warp_sync();
    }
    CROSSDOCK_ROLLED
    for (uint32_t base = 0; base < c.arena.num_ranks; base += kLanes) {
        const uint32_t peer = base + static_cast<uint32_t>(ctx.lane());
        Target target{};
        if (peer < c.arena.num_ranks)
            target = target_at(ctx, args, operation, static_cast<int>(peer), range, chunk, bit);
        if (!ctx.warp_any(target.exists)) continue;
        // In parts of a stage, the last of which takes the scales along.
        CROSSDOCK_ROLLED
        for (uint32_t first = 0; is_given && first < args.row_bytes; first += args.crew.chunk_bytes) {
            const uint32_t left = args.row_bytes - first;
            const uint32_t part = left < args.crew.chunk_bytes ? left : args.crew.chunk_bytes;
            if (is_leader(ctx)) stage.load(ctx, args.tokens + uint64_t{token} * args.row_bytes + first, part);
            stage.wait_loaded(ctx, round++);
            if (target.exists) stage.store(ctx, target.row + first, 0, part);
            stage.end_group(ctx);
            stage.wait_reusable(ctx);
            ctx.warp_sync();
        }
        if (is_given && args.scale_bytes > 0) {
            if (is_leader(ctx)) stage.load(ctx, args.scales + uint64_t{token} * args.scale_bytes, args.scale_bytes);
            stage.wait_loaded(ctx, round++);
            if (target.exists) stage.store(ctx, target.scales, 0, args.scale_bytes);
            stage.end_group(ctx);
            stage.wait_reusable(ctx);
            ctx.warp_sync();
        }
        if (target.exists) {
            if (has_weights) send_weights(args, plan, num, static_cast<int>(peer), target.weights);
            RowStage::wait_stores(ctx);
            ctx.store_landed_system(target.flag_word, target.flag);
        }
        ctx.warp_sync();
    }
}

CROSSDOCK_DEVICE void send_tokens(const Ctx& ctx, const HtDispatchArgs& args, const Operation& operation) {
    const HtCommon& c = args.common;
    const RowStage stage = stage_of_warp(ctx, args.shared);
    const uint32_t tokens = c.tables.routing->num_tokens;
    const ChunkRange range = ChunkRange::of(tokens, static_cast<uint32_t>(ctx.block_idx()), c.channels);
    uint32_t round = 0;
    CROSSDOCK_ROLLED
    for (uint32_t at = static_cast<uint32_t>(ctx.warp_idx()); at < range.size() * kChunkTokens;
         at += args.crew.producers) {
        const uint32_t chunk = range.first + at / kChunkTokens;
        const uint32_t bit = at % kChunkTokens;
        if (chunk * kChunkTokens + bit >= tokens) break;
        send_token(ctx, args, operation, range, chunk, bit, stage, round);
    }
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
