// SPDX-License-Identifier: Apache-2.0
// Low-latency combine: one kernel, both halves or one of them. Here its receive half: a token's rows are summed in a
// fixed order as soon as they have arrived. contract: nccl_ep.h, ncclEpCombine; protocol: docs/protocol.md.
#pragma once

#include "kernels/ll/combine_send.h"

namespace crossdock {
inline namespace CROSSDOCK_WORLD {

// Lists the cells of one token; those of masked ranks are left out.
CROSSDOCK_DEVICE void list_cells(const Ctx& ctx, const LlCombineArgs& args, uint32_t token, const TermList& terms) {
    const LlCommon& c = args.common;
    CROSSDOCK_ROLLED
    for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < c.topk; k += kLanes)
        terms.ranks[k] = rank_of_expert(c, expert_id(c, token, k));
    ctx.warp_sync();
    int place = 0;
    CROSSDOCK_ROLLED
    for (uint32_t base = 0; base < c.topk; base += kLanes) {
        const uint32_t k = base + static_cast<uint32_t>(ctx.lane());
        bool has_row = k < c.topk && terms.ranks[k] >= 0;
        CROSSDOCK_ROLLED
        for (uint32_t j = 0; has_row && !has_row_per_choice(args) && j < k; ++j)
            has_row = terms.ranks[j] != terms.ranks[k];
        const int own_place = place + ctx.warp_sum_before(has_row ? 1 : 0);
        place += ctx.warp_sum(has_row ? 1 : 0);
        if (k >= c.topk) continue;
        const uint32_t cell = cell_index(c, token, has_row_per_choice(args) ? k : static_cast<uint32_t>(own_place));
        const bool is_summed = has_row && is_active(ctx, c.scope, terms.ranks[k]);
        terms.index[k] = is_summed ? static_cast<int64_t>(cell) : -1;
        terms.weight[k] = has_row_per_choice(args) ? args.topk_weights[uint64_t{token} * c.topk + k] : 1.0f;
    }
    ctx.warp_sync();
}

CROSSDOCK_DEVICE void note_cell_read(const Ctx& ctx, const LlCommon& c, const Operation& operation, int64_t cell) {
    ctx.note_slot_read(c.rank, c.peers.at(c.rank, 0), operation.buffer, static_cast<uint64_t>(cell), operation.epoch);
}

// Cells in plain form: waits for their flags; what does not come is not summed.
CROSSDOCK_DEVICE void wait_for_cells(const Ctx& ctx, const LlCombineArgs& args, const Operation& operation,
                                     bool notes_reads, const TermList& terms) {
    const LlCommon& c = args.common;
    CROSSDOCK_ROLLED
    for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < c.topk; k += kLanes) {
        if (terms.index[k] < 0) continue;
        uint64_t content = kCellNothing;
        const uint64_t* flag = row_flag(c, operation, c.rank, static_cast<uint32_t>(terms.index[k]));
        const bool came = wait_word(ctx, c, operation, WaitStep::kRow, terms.ranks[k], flag, content);
        if (came && notes_reads) note_cell_read(ctx, c, operation, terms.index[k]);
        if (!came || content != kCellRow) terms.index[k] = -1;
    }
    ctx.warp_sync();
}

// Cells in tagged form: sums what comes, 16 bytes a lane.
template <DType kDType>
CROSSDOCK_DEVICE void sum_tagged(const Ctx& ctx, const LlCombineArgs& args, const Operation& operation,
                                 const TermList& terms, uint32_t first, uint32_t bytes, std::byte* out) {
    constexpr uint32_t kPerWord = 8 / dtype_bytes(kDType);
    constexpr uint32_t kRowsAtOnce = 4;
    const LlCommon& c = args.common;
    CROSSDOCK_ROLLED
    for (uint32_t at = first + 16 * static_cast<uint32_t>(ctx.lane()); at < first + bytes; at += 16 * kLanes) {
        float sums[2 * kPerWord] = {};
        CROSSDOCK_ROLLED
        for (uint32_t base = 0; base < c.topk; base += kRowsAtOnce) {
            const TaggedWord* words[kRowsAtOnce];
            TaggedPair pairs[kRowsAtOnce];
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kRowsAtOnce; ++i) {
                const int64_t cell = base + i < c.topk ? terms.index[base + i] : -1;
                words[i] = nullptr;
                if (cell < 0) continue;
                words[i] = tagged_row(c, operation, c.rank, static_cast<uint32_t>(cell)) + at / 8;
                pairs[i] = TaggedPair::load(ctx, words[i]);
            }
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kRowsAtOnce; ++i) {
                if (words[i] == nullptr || !pairs[i].wait(ctx, c, operation, terms.ranks[base + i], words[i])) continue;
                if (word_payload(pairs[i].first.tag) != kCellRow) continue;
                CROSSDOCK_ROLLED
                for (uint32_t e = 0; e < 2 * kPerWord; ++e) {
                    const uint64_t packed = e < kPerWord ? pairs[i].first.payload : pairs[i].second.payload;
                    const float element = element_of<kDType>(packed, e % kPerWord);
                    sums[e] = fused_multiply_add(terms.weight[base + i], element, sums[e]);
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
}

CROSSDOCK_DEVICE void sum_nvfp4_rows(const Ctx& ctx, const LlCombineArgs& args, const std::byte* cells,
                                     const TermList& terms, uint32_t first, uint32_t num, std::byte* out) {
    const LlCommon& c = args.common;
    const uint32_t elements = args.row_bytes / 2;
    CROSSDOCK_ROLLED
    for (uint32_t e = first + static_cast<uint32_t>(ctx.lane()); e < first + num; e += kLanes) {
        float sum = 0.0f;
        CROSSDOCK_ROLLED
        for (uint32_t k = 0; k < c.topk; ++k) {
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
    const TermList terms = terms_of_warp(ctx, args, shared);
    const std::byte* cells = plain_row(c, operation, c.rank, 0);
    const uint32_t step = static_cast<uint32_t>(share.num_blocks * share.warps);
    const uint32_t work = c.num_tokens * args.segments;
    CROSSDOCK_ROLLED
    for (uint32_t i = static_cast<uint32_t>(share.warp(ctx) * share.num_blocks + share.block); i < work; i += step) {
        // Neighbouring tokens go to different blocks.
        const uint32_t segment = i / c.num_tokens;
        const uint32_t token = i - segment * c.num_tokens;
        const uint32_t first = segment * args.segment_bytes;
        const uint32_t bytes = args.row_bytes - first < args.segment_bytes ? args.row_bytes - first : args.segment_bytes;
        std::byte* out = args.out_tokens + uint64_t{token} * args.row_bytes;
        list_cells(ctx, args, token, terms);
        ctx.mark(Step::kCombineListed);
        if (is_tagged) {
            sum_tagged<kDType>(ctx, args, operation, terms, first, bytes, out);
            CROSSDOCK_ROLLED
            for (uint32_t k = static_cast<uint32_t>(ctx.lane()); first == 0 && k < c.topk; k += kLanes) {
                if (terms.index[k] >= 0) note_cell_read(ctx, c, operation, terms.index[k]);
            }
        } else {
            wait_for_cells(ctx, args, operation, first == 0, terms);
            ctx.mark(Step::kCombineArrived);
            const uint32_t element = first / dtype_bytes(kDType);
            const uint32_t elements = bytes / dtype_bytes(kDType);
            if (args.wire == LlCombineWire::kNvfp4) {
                sum_nvfp4_rows(ctx, args, cells, terms, element, elements, out);
            } else {
                sum_rows<kDType>(ctx, {cells, c.offsets.row_stride, terms.index, terms.weight, c.topk}, element,
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
    ctx.wait_for_previous_kernels();
    load_head(ctx, c);
    if ((c.halves & kSendHalf) != 0) count_returns(ctx, args, shared);
    ctx.block_sync();
    Operation operation;
    const bool runs = read_head(ctx, c, operation);
    ctx.mark(Step::kCombineHead);
    if (runs && (c.halves & kSendHalf) != 0) return_tokens<kDType>(ctx, args, shared, operation);
    receive_for_good(ctx, c, operation, runs, ctx.num_warps(),
                     [&](const Share& share) { sum_tokens<kDType>(ctx, args, shared, operation, share); });
    ctx.mark(Step::kCombineEnd);
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
