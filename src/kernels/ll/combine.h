// SPDX-License-Identifier: Apache-2.0
// Low-latency combine: one kernel, both halves or one of them. Here its receive half: a token's rows are summed in a
// fixed order as soon as they have arrived. contract: nccl_ep.h, ncclEpCombine; protocol: docs/protocol.md.
#pragma once

#include "kernels/ll/combine_send.h"

namespace crossdock {
inline namespace CROSSDOCK_WORLD {

// Lists the cells of one token, in the order of its choices; those of masked ranks are left out. Returns how many.
CROSSDOCK_DEVICE uint32_t list_cells(const Ctx& ctx, const LlCombineArgs& args, uint32_t token, const TermList& terms) {
    const LlCommon& c = args.common;
    const bool per_choice = has_row_per_choice(args);
    int place = 0;  // ranks of the choices that all lanes have seen to
    int num = 0;
    CROSSDOCK_ROLLED
    for (uint32_t base = 0; base < c.topk; base += kLanes) {
        const uint32_t k = base + static_cast<uint32_t>(ctx.lane());
        const int rank = k < c.topk ? rank_of_expert(c, expert_id(c, token, k)) : -1;
        const bool repeats = ctx.lanes_before_with(rank) != 0 || !is_first_of_rank(c, token, base, rank);
        const bool has_row = rank >= 0 && (per_choice || !repeats);
        const int own_place = place + ctx.warp_sum_before(has_row ? 1 : 0);
        place += ctx.warp_sum(has_row ? 1 : 0);
        const bool is_summed = has_row && is_active(ctx, c.scope, rank);
        const int at = num + ctx.warp_sum_before(is_summed ? 1 : 0);
        num += ctx.warp_sum(is_summed ? 1 : 0);
        if (!is_summed) continue;
        terms.index[at] = static_cast<int64_t>(cell_index(c, token, per_choice ? k : static_cast<uint32_t>(own_place)));
        terms.weight[at] = per_choice ? args.topk_weights[uint64_t{token} * c.topk + k] : 1.0f;
        terms.ranks[at] = rank;
    }
    ctx.warp_sync();
    return static_cast<uint32_t>(num);
}

CROSSDOCK_DEVICE void note_cell_read(const Ctx& ctx, const LlCommon& c, const Operation& operation, int64_t cell) {
    ctx.note_slot_read(c.rank, c.peers.at(c.rank, 0), operation.buffer, static_cast<uint64_t>(cell), operation.epoch);
}

// Cells in plain form: waits for their flags; what does not come is not summed.
CROSSDOCK_DEVICE void wait_for_cells(const Ctx& ctx, const LlCombineArgs& args, const Operation& operation,
                                     bool notes_reads, uint32_t num, const TermList& terms) {
    const LlCommon& c = args.common;
    CROSSDOCK_ROLLED
    for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < num; k += kLanes) {
        uint64_t content = kCellNothing;
        const uint64_t* flag = row_flag(c, operation, c.rank, static_cast<uint32_t>(terms.index[k]));
        const bool came = wait_word(ctx, c, operation, WaitStep::kRow, terms.ranks[k], flag, content);
        if (came && notes_reads) note_cell_read(ctx, c, operation, terms.index[k]);
        if (!came || content != kCellRow) terms.index[k] = -1;
    }
    ctx.warp_sync();
}

// Cells in tagged form: sums what comes, 16 bytes a lane. False: not all has come.
template <DType kDType>
CROSSDOCK_DEVICE bool sum_tagged(const Ctx& ctx, const LlCombineArgs& args, const Operation& operation, uint32_t num,
                                 const TermList& terms, uint32_t first, uint32_t bytes, std::byte* out) {
    constexpr uint32_t kPerWord = 8 / dtype_bytes(kDType);
    constexpr uint32_t kRowsAtOnce = 4;
    const LlCommon& c = args.common;
    bool has_all = true;
    CROSSDOCK_ROLLED
    for (uint32_t at = first + 16 * static_cast<uint32_t>(ctx.lane()); at < first + bytes; at += 16 * kLanes) {
        float sums[2 * kPerWord] = {};
        CROSSDOCK_ROLLED
        for (uint32_t base = 0; base < num; base += kRowsAtOnce) {
            TaggedPair pairs[kRowsAtOnce];
            const auto row = [&](uint32_t i) {
                const uint32_t cell = static_cast<uint32_t>(terms.index[base + i < num ? base + i : base]);
                return tagged_row(c, operation, c.rank, cell) + at / 8;
            };
            const auto load = [&] {
                CROSSDOCK_UNROLL
                for (uint32_t i = 0; i < kRowsAtOnce; ++i) pairs[i] = TaggedPair::load(ctx, row(i));
            };
            int missing = 0;
            const auto arrived = [&] {
                bool all = true;
                CROSSDOCK_UNROLL
                for (uint32_t i = 0; i < kRowsAtOnce; ++i) {
                    if (pairs[i].is_of(operation)) continue;
                    all = false;
                    missing = terms.ranks[base + i < num ? base + i : base];
                }
                return all;
            };
            load();
            bool goes_on = true;
            CROSSDOCK_ROLLED
            while (!arrived() && goes_on) {
                const int peer = missing;  // who is to blame
                goes_on = wait_tagged(ctx, c, operation, WaitStep::kRow, peer, load,
                                      [&] { return arrived() || missing != peer; });
            }
            has_all = has_all && goes_on;
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kRowsAtOnce; ++i) {
                if (base + i >= num || !pairs[i].is_of(operation) || word_payload(pairs[i].first.tag) != kCellRow)
                    continue;
                CROSSDOCK_UNROLL
                for (uint32_t e = 0; e < 2 * kPerWord; ++e) {
                    const uint64_t packed = e < kPerWord ? pairs[i].first.payload : pairs[i].second.payload;
                    sums[e] =
                        fused_multiply_add(terms.weight[base + i], element_of<kDType>(packed, e % kPerWord), sums[e]);
                }
            }
        }
        Bytes16 sum{};
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < kPerWord; ++i) {
            sum.low |= packed_element<kDType>(sums[i], i);
            sum.high |= packed_element<kDType>(sums[kPerWord + i], i);
        }
        *reinterpret_cast<Bytes16*>(out + at) = sum;
    }
    return has_all;
}

CROSSDOCK_DEVICE void sum_nvfp4_rows(const Ctx& ctx, const LlCombineArgs& args, const std::byte* cells, uint32_t count,
                                     const TermList& terms, uint32_t first, uint32_t num, std::byte* out) {
    const LlCommon& c = args.common;
    const uint32_t elements = args.row_bytes / 2;
    CROSSDOCK_ROLLED
    for (uint32_t e = first + static_cast<uint32_t>(ctx.lane()); e < first + num; e += kLanes) {
        float sum = 0.0f;
        CROSSDOCK_ROLLED
        for (uint32_t k = 0; k < count; ++k) {
            if (terms.index[k] < 0) continue;
            const std::byte* wire = cells + static_cast<uint64_t>(terms.index[k]) * c.offsets.row_stride;
            const float value = nvfp4_element(wire, elements, e) * nvfp4_inverse_scale(wire, elements);
            sum = fused_multiply_add(terms.weight[k], value, sum);
        }
        store_element<DType::kBf16>(out, e, sum);
    }
}

// Work is shared by segments of tokens, so that few tokens still occupy many warps.
template <DType kDType>
CROSSDOCK_DEVICE void sum_tokens(const Ctx& ctx, const LlCombineArgs& args, const LlCombineShared& shared,
                                 const Operation& operation, const Share& share) {
    const LlCommon& c = args.common;
    const bool is_tagged = c.num_tokens <= c.tagged_tokens && allows_tagged(args);
    const uint32_t segment_bytes = is_tagged ? kTaggedSegmentBytes : args.segment_bytes;
    const uint32_t segments = is_tagged ? tagged_segments(args.row_bytes) : args.segments;
    const TermList terms = terms_of_warp(ctx, args, shared);
    const std::byte* cells = plain_row(c, operation, c.rank, 0);
    const uint32_t step = static_cast<uint32_t>(share.num_blocks * share.warps);
    const uint32_t work = c.num_tokens * segments;
    CROSSDOCK_ROLLED
    for (uint32_t i = static_cast<uint32_t>(share.warp(ctx) * share.num_blocks + share.block); i < work; i += step) {
        // Neighbouring tokens go to different blocks.
        const uint32_t segment = i / c.num_tokens;
        const uint32_t token = i - segment * c.num_tokens;
        const uint32_t first = segment * segment_bytes;
        const uint32_t bytes = args.row_bytes - first < segment_bytes ? args.row_bytes - first : segment_bytes;
        std::byte* out = args.out_tokens + uint64_t{token} * args.row_bytes;
        const uint32_t num = list_cells(ctx, args, token, terms);
        ctx.mark(Step::kCombineListed);
        if (is_tagged) {
            const bool notes = sum_tagged<kDType>(ctx, args, operation, num, terms, first, bytes, out) && first == 0;
            CROSSDOCK_ROLLED
            for (uint32_t k = static_cast<uint32_t>(ctx.lane()); notes && k < num; k += kLanes) {
                note_cell_read(ctx, c, operation, terms.index[k]);
            }
        } else {
            wait_for_cells(ctx, args, operation, first == 0, num, terms);
            ctx.mark(Step::kCombineArrived);
            const uint32_t element = first / dtype_bytes(kDType);
            const uint32_t elements = bytes / dtype_bytes(kDType);
            if (args.wire == LlCombineWire::kNvfp4) {
                sum_nvfp4_rows(ctx, args, cells, num, terms, element, elements, out);
            } else {
                sum_rows<kDType>(ctx, RowTerms{cells, c.offsets.row_stride, terms.index, terms.weight, num}, element,
                                 elements, out);
            }
        }
        ctx.warp_sync();
        ctx.mark(Step::kCombineSummed);
    }
}

template <DType kDType>
CROSSDOCK_DEVICE void ll_combine(const Ctx& ctx, const LlCombineArgs& args) {
    const LlCommon& c = args.common;
    const LlCombineShared& shared = args.shared;
    ctx.mark(Step::kCombineBegin);
    if (ctx.warp_idx() < static_cast<int>(c.crew.num_stages) && is_leader(ctx)) {
        stage_of(ctx, shared, static_cast<uint32_t>(ctx.warp_idx())).init();
        RowStage::initialised();
    }
    take_ticket(ctx, c);
    ctx.wait_for_previous_kernels();
    ctx.mark(Step::kCombineReady);
    const bool sends = (c.halves & kSendHalf) != 0;
    if (sends && ctx.warp_idx() == 0) ReturnList::count(ctx, args);
    load_head(ctx, c, 0);
    ctx.block_sync();
    PlainReturns plain(ctx, args, shared);
    if (sends && returns_plain_rows(ctx, args)) plain.begin(ctx);
    ctx.block_sync();
    Operation operation;
    const bool runs = read_head(ctx, c, operation);
    ctx.mark(Step::kCombineHead);
    if (runs && sends) return_tokens<kDType>(ctx, args, shared, operation, plain);
    if (!runs && sends && returns_plain_rows(ctx, args)) plain.abandon(ctx);
    receive_for_good(ctx, c, operation, runs, ctx.num_warps(),
                     [&](const Share& share) { sum_tokens<kDType>(ctx, args, shared, operation, share); });
    ctx.mark(Step::kCombineEnd);
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
