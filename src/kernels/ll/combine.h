// SPDX-License-Identifier: Apache-2.0
// Low-latency combine: one kernel, both halves or one of them. Here its receive half: a token's rows are summed in a
// fixed order as soon as they have arrived. contract: nccl_ep.h, ncclEpCombine; protocol: docs/protocol.md.
#pragma once

#include "kernels/ll/combine_send.h"

namespace crossdock {
inline namespace CROSSDOCK_WORLD {

// Waits for the rows of one token and lists them; rows of masked ranks are left out.
CROSSDOCK_DEVICE void collect_rows(const Ctx& ctx, const LlCombineArgs& args, const Operation& operation,
                                   uint32_t token, bool notes_reads, const TermList& terms) {
    const LlCommon& c = args.common;
    const bool has_row_per_choice = c.expert_major && args.wire != LlCombineWire::kSums;
    for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < c.topk; k += kLanes)
        terms.expert_ids[k] = expert_id(c, token, k);
    ctx.warp_sync();
    for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < c.topk; k += kLanes) {
        terms.index[k] = -1;
        terms.weight[k] = has_row_per_choice ? args.topk_weights[uint64_t{token} * c.topk + k] : 1.0f;
        const int source = rank_of_expert(c, terms.expert_ids[k]);
        if (source < 0 || !is_active(ctx, c.scope, source)) continue;
        if (!has_row_per_choice && !is_first_of_rank(c, terms.expert_ids, k)) continue;
        const uint64_t cell = cell_index(c, token, has_row_per_choice ? k : place_of_rank(c, terms.expert_ids, source));
        uint64_t content = kCellNothing;
        if (!wait_word(ctx, c, operation, WaitStep::kRow, source, row_flag(c, c.rank, operation.buffer, cell), content))
            continue;
        if (notes_reads) ctx.note_slot_read(c.rank, c.peers.at(c.rank, 0), operation.buffer, cell, operation.epoch);
        if (content == kCellRow) terms.index[k] = static_cast<int64_t>(cell);
    }
    ctx.warp_sync();
}

CROSSDOCK_DEVICE void sum_nvfp4_rows(const Ctx& ctx, const LlCombineArgs& args, const std::byte* cells,
                                     const TermList& terms, uint32_t first, uint32_t num, std::byte* out) {
    const LlCommon& c = args.common;
    const uint32_t elements = args.row_bytes / 2;
    for (uint32_t e = first + static_cast<uint32_t>(ctx.lane()); e < first + num; e += kLanes) {
        float sum = 0.0f;
        for (uint32_t k = 0; k < c.topk; ++k) {
            if (terms.index[k] < 0) continue;
            const std::byte* wire = cells + static_cast<uint64_t>(terms.index[k]) * c.arena.cell_bytes();
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
    const uint32_t elements = args.row_bytes / dtype_bytes(args.dtype);
    const uint32_t segments = (elements + args.segment_elements - 1) / args.segment_elements;
    const TermList terms = terms_of_warp(ctx, args, shared);
    const std::byte* cells = cell_of(c, c.rank, operation.buffer, 0);

    const uint64_t warps = static_cast<uint64_t>(share.num_blocks) * static_cast<uint64_t>(ctx.num_warps());
    const uint64_t work = uint64_t{c.num_tokens} * segments;
    for (uint64_t i = static_cast<uint64_t>(ctx.warp_idx()) * static_cast<uint64_t>(share.num_blocks) +
                      static_cast<uint64_t>(share.block);
         i < work; i += warps) {
        const uint32_t token = static_cast<uint32_t>(i / segments);
        const uint32_t first = static_cast<uint32_t>(i % segments) * args.segment_elements;
        const uint32_t num = elements - first < args.segment_elements ? elements - first : args.segment_elements;
        std::byte* out = args.out_tokens + uint64_t{token} * args.row_bytes;
        collect_rows(ctx, args, operation, token, first == 0, terms);
        if (args.wire == LlCombineWire::kNvfp4) {
            sum_nvfp4_rows(ctx, args, cells, terms, first, num, out);
        } else {
            sum_rows<kDType>(ctx, {cells, c.arena.cell_bytes(), terms.index, terms.weight, c.topk}, first, num, out);
        }
        ctx.warp_sync();
    }
}

template <DType kDType>
CROSSDOCK_DEVICE void ll_combine(const Ctx& ctx, const LlCombineArgs& args) {
    const LlCommon& c = args.common;
    const LlCombineShared shared = LlCombineShared::of(args);
    Operation operation;
    const bool runs = begin_operation(ctx, c, operation);
    RowStage stage(ctx,
                   ctx.shared_memory() + shared.stages + static_cast<uint32_t>(ctx.warp_idx()) * shared.stage_bytes);
    if (runs && (c.halves & kSendHalf) != 0) return_tokens<kDType>(ctx, args, shared, operation, stage);
    if (runs && receives(c)) {
        sum_tokens<kDType>(ctx, args, shared, operation, {ctx.block_idx(), ctx.num_blocks()});
    }
    end_operation(ctx, c, operation, runs, [&] { sum_tokens<kDType>(ctx, args, shared, operation, {0, 1}); });
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
