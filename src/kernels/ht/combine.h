// SPDX-License-Identifier: Apache-2.0
// High-throughput combine: one kernel. Here its receive half: a warp takes a token and sums the one row that each of
// its ranks has for it, in ascending order of ranks, in fp32 with one rounding. contract: nccl_ep.h, ncclEpCombine;
// protocol: docs/protocol.md.
#pragma once

#include "device/row_copy.h"
#include "kernels/ht/combine_send.h"

namespace crossdock {
inline namespace CROSSDOCK_WORLD {

// The gradients of a token's weights, from the packets of its ranks (plan.rows, numbered as the ranks are listed in
// plan.ids' upper part). One warp.
CROSSDOCK_DEVICE float weight_of_choice(const HtCombineArgs& args, const HtPlan& plan, uint32_t num_rows,
                                        uint32_t num_experts, int32_t id, const uint32_t* ranks) {
    const int32_t experts = static_cast<int32_t>(args.common.arena.experts_per_rank);
    const int32_t rank = id / experts;
    uint32_t at = 0;
    CROSSDOCK_ROLLED
    while (at < num_rows && ranks[at] != static_cast<uint32_t>(rank)) ++at;
    if (at == num_rows) return 0.0f;
    const uint32_t place = experts_below(plan, num_experts, id) - experts_below(plan, num_experts, rank * experts);
    return reinterpret_cast<const float*>(plan.rows[at] + args.packet.weights_at())[place];
}

template <DType kDType>
CROSSDOCK_DEVICE void sum_token(const Ctx& ctx, const HtCombineArgs& args, const Operation& operation,
                                const ChunkRange& range, uint32_t chunk, uint32_t bit) {
    const HtCommon& c = args.common;
    const uint32_t token = chunk * kChunkTokens + bit;
    const uint32_t channel = static_cast<uint32_t>(ctx.block_idx());
    const HtPlan plan = HtPlan::of_warp(ctx, args.shared, c.topk);
    const bool has_weights = args.with_weights;
    const uint32_t num_experts = has_weights ? sort_choices(ctx, c, token, plan) : 0;
    // plan.weights is not needed here: it holds the ranks of the rows.
    uint32_t* ranks = reinterpret_cast<uint32_t*>(plan.weights);
    uint32_t num = 0;
    CROSSDOCK_ROLLED
    for (uint32_t base = 0; base < c.arena.num_ranks; base += kLanes) {
        const uint32_t peer = base + static_cast<uint32_t>(ctx.lane());
        const std::byte* row = nullptr;
        if (peer < c.arena.num_ranks) {
            const int rank = static_cast<int>(peer);
            const SentRow sent = sent_row(c, rank, chunk, bit, range);
            const uint32_t number = c.tables.bases[peer] + sent.number;
            if (sent.exists && travels(c, number)) {
                const uint32_t state = peer_states(ctx, args.shared)[peer];
                if (state == kDirect) {
                    row = args.token_windows.at(rank, uint64_t{number} * args.row_bytes);
                } else if (state == kEntered) {
                    const Ring ring = Ring::of(c, c.rank, rank, channel);
                    if (wait_packet(ctx, c, operation, rank, ring, sent.packet, args.packet.slots))
                        row = ring.packets + uint64_t{sent.packet % args.packet.slots} * args.packet.stride;
                }
            }
        }
        const int has_row = row != nullptr ? 1 : 0;
        const uint32_t at = num + static_cast<uint32_t>(ctx.warp_sum_before(has_row));
        num += static_cast<uint32_t>(ctx.warp_sum(has_row));
        if (row != nullptr) {
            plan.rows[at] = row;
            ranks[at] = peer;
        }
    }
    ctx.warp_sync();
    if (token < c.num_tokens) {
        sum_rows<kDType>(ctx, PointerTerms{plan.rows, num}, 0, args.row_bytes / dtype_bytes(kDType),
                         args.out_tokens + uint64_t{token} * args.row_bytes);
        CROSSDOCK_ROLLED
        for (uint32_t k = static_cast<uint32_t>(ctx.lane()); has_weights && k < c.topk; k += kLanes) {
            args.out_weights[uint64_t{token} * c.topk + k] =
                plan.ids[k] < 0 ? 0.0f : weight_of_choice(args, plan, num, num_experts, plan.ids[k], ranks);
        }
    }
    ctx.warp_sync();
    CROSSDOCK_ROLLED
    for (uint32_t i = static_cast<uint32_t>(ctx.lane()); i < num; i += kLanes) {
        const int rank = static_cast<int>(ranks[i]);
        if (peer_states(ctx, args.shared)[rank] != kEntered) continue;
        const SentRow sent = sent_row(c, rank, chunk, bit, range);
        give_credit(ctx, c, operation, rank, channel, Ring::of(c, c.rank, rank, channel), sent.packet,
                    args.packet.slots);
    }
    ctx.warp_sync();
}

template <DType kDType>
CROSSDOCK_DEVICE void sum_tokens(const Ctx& ctx, const HtCombineArgs& args, const Operation& operation, uint32_t warp,
                                 uint32_t warps) {
    const HtCommon& c = args.common;
    const uint32_t tokens = c.tables.routing->num_tokens;
    const ChunkRange range = ChunkRange::of(tokens, static_cast<uint32_t>(ctx.block_idx()), c.channels);
    CROSSDOCK_ROLLED
    for (uint32_t at = warp; at < range.size() * kChunkTokens; at += warps) {
        const uint32_t token = range.first * kChunkTokens + at;
        if (token < tokens) {
            sum_token<kDType>(ctx, args, operation, range, range.first + at / kChunkTokens, at % kChunkTokens);
        }
    }
}

// Nobody's rows may be overwritten while peers still read them: everybody says when it has finished. One block, after
// all others.
CROSSDOCK_DEVICE void wait_until_all_have_read(const Ctx& ctx, const HtCommon& c, const Operation& operation,
                                               const uint32_t* states) {
    const auto word = [&](int owner, int writer) {
        return reinterpret_cast<uint64_t*>(c.peers.at(owner, c.offsets.finished)) + writer;
    };
    CROSSDOCK_ROLLED
    for (int peer = thread_idx(ctx); peer < static_cast<int>(c.arena.num_ranks); peer += num_threads(ctx)) {
        if (states[peer] == kDirect) ctx.store_entered_system(word(peer, c.rank), operation.epoch);
    }
    CROSSDOCK_ROLLED
    for (int peer = thread_idx(ctx); peer < static_cast<int>(c.arena.num_ranks); peer += num_threads(ctx)) {
        if (states[peer] != kDirect || !is_active(ctx, c.scope, peer)) continue;
        const uint64_t* finished = word(c.rank, peer);
        wait_for(
            ctx, c.scope, operation, WaitStep::kFinished, peer, operation.epoch,
            [&] { return ctx.load_acquire_system(finished); },
            [&](uint64_t epoch) { return epoch >= operation.epoch; });
    }
}

template <DType kDType>
CROSSDOCK_DEVICE void ht_combine(const Ctx& ctx, const HtCombineArgs& args) {
    const HtCommon& c = args.common;
    init_stage(ctx, args.crew, args.shared);
    ctx.wait_for_previous_kernels();
    const Operation operation = begin_operation(ctx, c);
    uint32_t* states = peer_states(ctx, args.shared);
    wait_all_entered(ctx, c, operation, states);
    const bool runs = !has_failed(ctx, c.scope);
    const uint32_t warp = static_cast<uint32_t>(ctx.warp_idx());
    const uint32_t producers = args.crew.producers;
    if (runs && warp < producers) return_rows<kDType>(ctx, args, operation);
    if (runs && warp >= producers)
        sum_tokens<kDType>(ctx, args, operation, warp - producers, args.crew.warps_per_block - producers);
    // Tokens that the routing does not know of come home as zeros.
    const uint64_t known = c.tables.routing->num_tokens;
    CROSSDOCK_ROLLED
    for (uint64_t token = known + static_cast<uint32_t>(ctx.block_idx() * ctx.num_warps()) + warp;
         runs && token < c.num_tokens; token += static_cast<uint32_t>(ctx.num_blocks() * ctx.num_warps())) {
        zero_row(ctx, args.out_tokens + token * args.row_bytes, args.row_bytes);
    }
    if (c.has_windows && is_last_block(ctx, c)) wait_until_all_have_read(ctx, c, operation, states);
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
