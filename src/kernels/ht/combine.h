// SPDX-License-Identifier: Apache-2.0
// High-throughput combine: one kernel. Here its receive half: a warp takes a token and sums the one row that each of
// its ranks (of another team: the team) has for it, in ascending order, or the rows of its choices in their order
// (HtWire::kChoices), in fp32 with one rounding. Contract: nccl_ep.h, ncclEpCombine; protocol: docs/protocol.md.
#pragma once

#include "device/row_copy.h"
#include "kernels/ht/combine_cross.h"
#include "kernels/ht/combine_weights.h"
#include "kernels/ht/sum_pipeline.h"
#include "kernels/ht/windows.h"

namespace crossdock {
namespace {

// Who may have a row of a sum, in ascending order: the ranks of this team, and the other teams as wholes.
struct Summand {
    uint32_t number;  // of the rank, or of the team
    bool is_team;

    CROSSDOCK_DEVICE static uint32_t num(const HtCommon& c) { return team_size(c) + num_teams(c) - 1; }
    CROSSDOCK_DEVICE static Summand of(const HtCommon& c, uint32_t i) {
        if constexpr (!kHasGinPeers) return {i, false};
        const uint32_t own = own_team(c);
        if (i >= own && i < own + team_size(c)) return {first_of_team(c) + i - own, false};
        return {i < own ? i : i - team_size(c) + 1, true};
    }
    CROSSDOCK_DEVICE static Summand of_rank(const HtCommon& c, uint32_t rank) {
        if constexpr (!kHasGinPeers) return {rank, false};
        const bool is_here = rank >= first_of_team(c) && rank < end_of_team(c);
        return is_here ? Summand{rank, false} : Summand{rank / team_size(c), true};
    }
    CROSSDOCK_DEVICE friend bool operator==(const Summand& a, const Summand& b) {
        return a.number == b.number && a.is_team == b.is_team;
    }
};

// Elastic. The weights that came with the plan's rows or packets from `first` on. One warp.
template <HtWire kWire>
CROSSDOCK_DEVICE void collect_words(const Ctx& ctx, const HtElasticCombineArgs& args, const HtPlan& plan,
                                    uint32_t first, uint32_t num, uint32_t token) {
    const HtCommon& c = args.common;
    for_lanes(ctx, args.weight_bytes == 0 ? 0 : c.topk, [&](uint32_t column) {
        uint32_t word = 0;
        CROSSDOCK_ROLLED
        for (uint32_t i = first; i < num; ++i) {
            const Summand summand = Summand::of(c, plan.origins[i]);
            word |= summand.is_team
                        ? reinterpret_cast<const uint32_t*>(plan.rows[i] + words_begin<kWire>(args))[column]
                        : word_of_lsa_row<kWire>(ctx, args, c.rank, token, summand.number, plan.rows[i], column);
        }
        args.elastic.out_weights[uint64_t{token} * c.topk + column] = float_of(word);
    });
}

// Replaces the plan's rows from `first_row` to `num`, packets that have come, by the rows of the token's choices, in
// the order of choices. Returns the plan's number of rows. One warp.
template <typename Args>
CROSSDOCK_DEVICE uint32_t note_choices(const Ctx& ctx, const Args& args, const HtPlan& plan, uint32_t first_row,
                                       uint32_t num, uint32_t token) {
    const HtCommon& c = args.common;
    const uint32_t experts = c.arena.experts_per_rank;
    const int32_t* const ids = c.tables.ids + uint64_t{token} * c.topk;
    uint32_t rows = first_row;
    ctx.warp_sync();  // the plan is complete
    CROSSDOCK_ROLLED
    for (uint32_t base = 0; base < c.topk; base += kLanes) {
        const uint32_t k = base + ctx.lane();
        const int32_t id = k < c.topk ? ids[k] : -1;
        const Summand summand = Summand::of_rank(c, id < 0 ? c.rank : static_cast<uint32_t>(id) / experts);
        const uint32_t first = summand.is_team ? summand.number * team_size(c) : summand.number;
        const PlaceInPacket place = PlaceInPacket::of(ctx, ids, c.topk, k, id, static_cast<int32_t>(first * experts));
        const std::byte* row = nullptr;
        CROSSDOCK_ROLLED
        for (uint32_t i = first_row; place.exists && i < num; ++i) {
            if (Summand::of(c, plan.origins[i]) != summand) continue;
            row = summand.is_team
                      ? GinRing::of_rows(c, summand.number, ctx.block_idx()).incoming(args.gin_rows, plan.slots[i])
                      : LsaRing::combine_from(c, c.rank, summand.number, ctx.block_idx())
                            .packet(args.rows, plan.slots[i]);
            row += rows_begin<HtWire::kChoices>(args) + uint64_t{place.row} * args.row_bytes;
        }
        const uint32_t has_row = row != nullptr ? 1 : 0;
        const uint32_t at = rows + ctx.warp_sum_before(has_row);
        if (row != nullptr) plan.rows[at] = row;
        rows += ctx.warp_sum(has_row);
    }
    return rows;
}

template <DType kDType, HtWire kWire, typename Args>
CROSSDOCK_DEVICE void sum_token(const Ctx& ctx, const Args& args, const Operation& operation, const Share& share,
                                uint32_t token) {
    const HtCommon& c = args.common;
    const uint32_t channel = ctx.block_idx();
    const HtPlan plan = HtPlan::of_warp(ctx, args.shared, c.topk);
    const uint32_t* states = peer_states(ctx, args.shared);
    ctx.enter(Phase::kCombineRows);
    uint32_t first = 0;
    if constexpr (kIsElastic<Args>) first = note_biases(ctx, args, plan, token);
    uint32_t num = first;
    CROSSDOCK_ROLLED
    for (uint32_t base = 0; base < Summand::num(c); base += kLanes) {
        const uint32_t i = base + ctx.lane();
        const bool is_summand = i < Summand::num(c);
        const Summand summand = is_summand ? Summand::of(c, i) : Summand{0, false};
        const std::byte* row = nullptr;
        SentRow sent{false, 0, 0};
        if (is_summand && summand.is_team) {
            sent = crossing_row(c, Crossing::kOut, summand.number, token, share);
            const GinRing ring = GinRing::of_rows(c, summand.number, channel);
            if (sent.exists && ring.wait_packet(ctx, operation, args.gin_rows, sent.packet))
                row = ring.incoming(args.gin_rows, sent.packet);
        } else if (is_summand && states[summand.number] != kAbsent) {
            sent = sent_row(c, summand.number, token, share);
            find_lsa_row(ctx, args, operation, c.rank, summand.number, sent, row);
        }
        num += note_rows(ctx, plan, num, row, i, sent.packet);
    }
    uint32_t rows = num;
    if constexpr (kWire == HtWire::kChoices) {
        if constexpr (kIsElastic<Args>) {
            ctx.warp_sync();  // the plan is complete
            if (token < c.num_tokens) collect_words<kWire>(ctx, args, plan, first, num, token);
        }
        rows = note_choices(ctx, args, plan, first, num, token);
    }
    ctx.warp_sync();
    ctx.enter(Phase::kCombineAdd);
    if (token < c.num_tokens) {
        std::byte* const out = args.out_tokens + uint64_t{token} * args.row_bytes;
        sum_wire_rows<kWire, kDType>(ctx, plan.rows, rows, args.row_bytes, args.warp_layout.quantised_bytes(), out);
        if constexpr (kIsElastic<Args> && kWire != HtWire::kChoices)
            collect_words<kWire>(ctx, args, plan, first, num, token);
    }
    ctx.warp_sync();
    ctx.enter(Phase::kCombineCredit);
    CROSSDOCK_ROLLED
    for (uint32_t i = first + ctx.lane(); i < num; i += kLanes) {
        const Summand summand = Summand::of(c, plan.origins[i]);
        if (summand.is_team) {
            GinRing::of_rows(c, summand.number, channel).give_credit(ctx, operation, args.gin_rows, plan.slots[i]);
        } else if (states[summand.number] == kEntered) {
            LsaRing::combine_from(c, c.rank, summand.number, channel)
                .give_credit(ctx, operation, args.rows, plan.slots[i]);
        }
    }
    ctx.warp_sync();
}

// warp: among the `warps` of this block that receive. Rows that are read in place need no order: then CPUs' warps claim
// tokens when they are free, and all end together; GPUs have a pipeline for them.
template <DType kDType, HtWire kWire, typename Args>
CROSSDOCK_DEVICE void sum_tokens(const Ctx& ctx, const Args& args, const Operation& operation, uint32_t warp,
                                 uint32_t warps) {
    const HtCommon& c = args.common;
    const uint32_t tokens = c.tables.routing->num_tokens;
    const Share own = Share::of(tokens, ctx.block_idx(), c.channels);
    if (kLanes == 1 && !kHasGinPeers && are_all_direct(ctx, c, args.shared)) {
        for (;;) {
            const uint32_t token = claim_next(ctx, c, operation);
            if (token >= tokens) return;
            sum_token<kDType, kWire>(ctx, args, operation, own, token);
        }
    }
    CROSSDOCK_ROLLED
    for (uint32_t token = own.first + warp; token < own.end; token += warps)
        sum_token<kDType, kWire>(ctx, args, operation, own, token);
}

template <DType kDType, HtWire kWire = HtWire::kRows, typename Args>
CROSSDOCK_DEVICE void ht_combine(const Ctx& ctx, const Args& args) {
    static_assert(!is_quantised(kWire) || kDType == DType::kBf16, "quantised rows are bf16 before and after");
    const HtCommon& c = args.common;
    if (kWire != HtWire::kChoices && args.warp_layout.summers > 0) {
        SumPipeline<kDType, kWire, Args>::init(ctx, args);
    } else {
        init_stages(ctx, args.warp_layout, args.shared);
    }
    HtNote::init_all(ctx, args.warp_layout, args.shared);
    GinRing::init_states(ctx, c);
    ctx.wait_for_previous_kernels();
    ctx.enter(Phase::kCombineBegin);
    const Operation operation = begin_operation(ctx, c, [] {});
    uint32_t* states = peer_states(ctx, args.shared);
    const bool runs = wait_all_entered(ctx, c, operation, states, !c.expert_major, [](uint32_t, uint64_t) {});
    const HtWarpLayout& warp_layout = args.warp_layout;
    const uint32_t warp = ctx.warp_idx();
    const bool all_direct = !kHasGinPeers && are_all_direct(ctx, c, args.shared);
    const uint32_t pipeline = c.expert_major || all_direct ? warp_layout.pipeline() : 0;
    if (!runs) {
        // Nothing is sent, read or awaited.
    } else if (kWire != HtWire::kChoices && warp < pipeline) {
        SumPipeline<kDType, kWire, Args>(ctx, args, operation).run(ctx, warp);
    } else if (warp < warp_layout.producers) {
        if (kWire != HtWire::kChoices && kLanes == 1 && c.expert_major) {
            SumReturner<kDType, kWire, Args>(ctx, args, operation).run(ctx);
        } else {
            RowReturner<kWire, Args>(ctx, args, operation).run(ctx);
        }
    } else if (warp < warp_layout.producers + warp_layout.consumers) {
        if (c.expert_major || pipeline == 0)
            sum_tokens<kDType, kWire>(ctx, args, operation, warp - warp_layout.producers, warp_layout.consumers);
    } else if (warp_layout.is_announcer(warp)) {
        announce_packets(ctx, c, warp_layout, args.shared, operation, args.rows);
    } else if (kHasGinPeers && warp >= warp_layout.warps() - warp_layout.forwarders) {
        RowGatherer<kDType, kWire, Args>(ctx, args, operation, warp - (warp_layout.warps() - warp_layout.forwarders),
                                         warp_layout.forwarders)
            .run(ctx);
    } else {
        exchange_gradients(ctx, args, operation, warp - warp_layout.producers - warp_layout.consumers,
                           warp_layout.weight_warps);
    }
    // Tokens that the routing does not know of return as zeros.
    const uint64_t known = c.tables.routing->num_tokens;
    CROSSDOCK_ROLLED
    for (uint64_t token = known + ctx.block_idx() * ctx.num_warps() + warp; runs && token < c.num_tokens;
         token += ctx.num_blocks() * ctx.num_warps()) {
        zero_row(ctx, args.out_tokens + token * args.row_bytes, args.row_bytes);
    }
    ctx.enter(Phase::kCombineEnd);
    if constexpr (kIsElastic<Args>) return expect_room(ctx, c, args.elastic.rows, UINT32_MAX);
    if (c.has_windows && is_last_block(ctx, c)) wait_until_all_have_read(ctx, c, operation, states);
}

}  // namespace
}  // namespace crossdock
