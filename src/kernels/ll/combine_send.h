// SPDX-License-Identifier: Apache-2.0
// Combine, send half: the experts' rows go back to the rank that each token came from, into that token's own cells.
#pragma once

#include "device/nvfp4.h"
#include "device/row_stage.h"
#include "device/sum_rows.h"
#include "kernels/ll/tagged_rows.h"

namespace crossdock {

// Beside the epoch in a cell's flag, or in its words' tags.
enum CellContent : uint64_t { kCellRow = 0, kCellNothing = 1 };  // nothing: the choice had no room at its expert

inline namespace CROSSDOCK_WORLD {

// A warp's list of rows to sum, and the ranks of the choices of the token that it works on.
struct TermList {
    int64_t* index;
    float* weight;
    int32_t* ranks;
};

CROSSDOCK_DEVICE TermList terms_of_warp(const Ctx& ctx, const LlCombineArgs& args, const LlCombineShared& shared) {
    const uint32_t topk = args.common.topk;
    const uint32_t warp = static_cast<uint32_t>(ctx.warp_idx());
    int64_t* index = reinterpret_cast<int64_t*>(ctx.shared_memory() + shared.terms);
    float* weight = reinterpret_cast<float*>(index + uint64_t{topk} * args.common.crew.warps_per_block);
    int32_t* ranks = reinterpret_cast<int32_t*>(weight + uint64_t{topk} * args.common.crew.warps_per_block);
    return {index + warp * topk, weight + warp * topk, ranks + warp * topk};
}

CROSSDOCK_DEVICE RowStage stage_of(const Ctx& ctx, const LlCombineShared& shared, uint32_t stage) {
    return RowStage(ctx.shared_memory() + shared.stages + uint64_t{shared.stage_bytes} * stage);
}

// A row per choice goes home; otherwise one a rank.
CROSSDOCK_DEVICE bool has_row_per_choice(const LlCombineArgs& args) {
    return args.common.expert_major && args.wire != LlCombineWire::kSums;
}
// Rows that the kernel computes before they go.
CROSSDOCK_DEVICE bool has_computed_rows(const LlCombineArgs& args) { return args.wire != LlCombineWire::kRows; }
// NVFP4 rows never take the tagged form: their receiver reads them in another order than they come.
CROSSDOCK_DEVICE bool allows_tagged(const LlCombineArgs& args) { return args.wire != LlCombineWire::kNvfp4; }

// A row on its way home.
struct Return {
    int home = 0;
    uint32_t slot = 0;  // of its token among those of home; with a row a choice: number of the choice among those of home
    int64_t row_idx = 0;  // among all rows here; -1: the choice had no room
    uint32_t cell = 0;
};

// The rows of either form, counted over the homes below.
CROSSDOCK_DEVICE int* rows_before(const Ctx& ctx, const LlCommon& c, const LlCombineShared& shared, bool is_tagged) {
    return reinterpret_cast<int*>(ctx.shared_memory() + shared.rows_before) + (is_tagged ? c.arena.num_ranks + 1 : 0);
}

// Followed by a barrier of the block.
CROSSDOCK_DEVICE void count_returns(const Ctx& ctx, const LlCombineArgs& args, const LlCombineShared& shared) {
    const LlCommon& c = args.common;
    int* plain = rows_before(ctx, c, shared, false);
    int* tagged = rows_before(ctx, c, shared, true);
    if (ctx.warp_idx() != ctx.num_warps() / 2) return;
    int plain_rows = 0;
    int tagged_rows = 0;
    CROSSDOCK_ROLLED
    for (uint32_t base = 0; base < c.arena.num_ranks; base += kLanes) {
        const uint32_t source = base + static_cast<uint32_t>(ctx.lane());
        LlReceived received{};
        if (source < c.arena.num_ranks) received = *received_from(c, static_cast<int>(source));
        const int rows = static_cast<int>(has_row_per_choice(args) ? received.choices : received.rows);
        const bool is_tagged = received.tagged != 0 && allows_tagged(args);
        const int plain_before = plain_rows + ctx.warp_sum_before(is_tagged ? 0 : rows);
        const int tagged_before = tagged_rows + ctx.warp_sum_before(is_tagged ? rows : 0);
        if (source < c.arena.num_ranks) {
            plain[source] = plain_before;
            tagged[source] = tagged_before;
        }
        plain_rows += ctx.warp_sum(is_tagged ? 0 : rows);
        tagged_rows += ctx.warp_sum(is_tagged ? rows : 0);
    }
    if (is_leader(ctx)) {
        plain[c.arena.num_ranks] = plain_rows;
        tagged[c.arena.num_ranks] = tagged_rows;
    }
}

CROSSDOCK_DEVICE Return return_of(const LlCombineArgs& args, const ReceivedRow& row) {
    const LlCommon& c = args.common;
    if (has_row_per_choice(args)) {
        const LlChoice choice = *choice_of(c, row.source, row.slot);
        return {row.source, row.slot, choice.row_idx, choice.cell};
    }
    return {row.source, row.slot, static_cast<int64_t>(plain_slot(c, row.source, row.slot)),
            row_record(c, row.source, row.slot)->cell};
}

// The home ranks' weights go ahead to the ranks that weight and sum before they send: a warp takes a token.
CROSSDOCK_DEVICE void announce_weights(const Ctx& ctx, const LlCombineArgs& args, const Operation& operation) {
    const LlCommon& c = args.common;
    const uint32_t warps = static_cast<uint32_t>(ctx.num_blocks() * ctx.num_warps());
    CROSSDOCK_ROLLED
    for (uint32_t token = static_cast<uint32_t>(ctx.warp_idx() * ctx.num_blocks() + ctx.block_idx());
         token < c.num_tokens; token += warps) {
        const float* weights = args.topk_weights + uint64_t{token} * c.topk;
        CROSSDOCK_ROLLED
        for (uint32_t k = 0; k < c.topk; ++k) {
            const int peer = rank_of_expert(c, expert_id(c, token, k));
            if (peer < 0 || !is_first_of_rank(c, token, k, peer)) continue;
            if (ctx.warp_broadcast(is_leader(ctx) && wait_credit(ctx, c, operation, peer) ? 1u : 0u) == 0) continue;
            TaggedWord* words = weight_words(c, operation, peer, c.rank, token);
            CROSSDOCK_ROLLED
            for (uint32_t i = static_cast<uint32_t>(ctx.lane()); 2 * i < c.topk; i += kLanes) {
                const uint32_t upper = 2 * i + 1 < c.topk ? bits_of(weights[2 * i + 1]) : 0;
                ctx.store_tagged(words + i, uint64_t{upper} << 32 | bits_of(weights[2 * i]),
                                 pack_word(operation.epoch, 0));
            }
        }
    }
}

// Raises the flag of a cell whose row has been stored, or that stays empty.
CROSSDOCK_DEVICE void flag_cell(const Ctx& ctx, const LlCommon& c, const Operation& operation, const Return& row,
                                CellContent content) {
    ctx.store_landed_system(row_flag(c, operation, row.home, row.cell), pack_word(operation.epoch, content));
}

CROSSDOCK_DEVICE void note_cell_written(const Ctx& ctx, const LlCommon& c, const Operation& operation,
                                        const Return& row) {
    ctx.note_slot_written(c.rank, row.home, c.peers.at(row.home, 0), operation.buffer, row.cell, operation.epoch);
}

// Rows as they are, in plain form: a warp's leader brings one through the warp's stage.
CROSSDOCK_DEVICE void return_plain(const Ctx& ctx, const LlCombineArgs& args, const LlCombineShared& shared,
                                   const Operation& operation) {
    const LlCommon& c = args.common;
    const int stages = static_cast<int>(c.crew.num_stages);
    if (ctx.warp_idx() >= stages || !is_leader(ctx)) return;
    const RowStage stage = stage_of(ctx, shared, static_cast<uint32_t>(ctx.warp_idx()));
    const int* before = rows_before(ctx, c, shared, false);
    uint32_t round = 0;
    ReceivedRow received;
    CROSSDOCK_ROLLED
    for (int i = ctx.warp_idx() * ctx.num_blocks() + ctx.block_idx(); i < before[c.arena.num_ranks];
         i += stages * ctx.num_blocks()) {
        received.advance(before, i);
        const Return row = return_of(args, received);
        if (!wait_credit(ctx, c, operation, row.home)) continue;
        note_cell_written(ctx, c, operation, row);
        if (row.row_idx < 0) {
            flag_cell(ctx, c, operation, row, kCellNothing);
            continue;
        }
        const std::byte* source = args.tokens + static_cast<uint64_t>(row.row_idx) * args.row_bytes;
        std::byte* target = plain_row(c, operation, row.home, row.cell);
        CROSSDOCK_ROLLED
        for (uint32_t first = 0; first < args.row_bytes; first += c.crew.chunk_bytes) {
            const uint32_t left = args.row_bytes - first;
            const uint32_t chunk = left < c.crew.chunk_bytes ? left : c.crew.chunk_bytes;
            stage.load(ctx, source + first, chunk);
            stage.wait_loaded(ctx, round++);
            ctx.mark(Step::kCombineLoaded);
            stage.store(ctx, target + first, 0, chunk);
            stage.end_group(ctx);
            ctx.mark(Step::kCombineStored);
            stage.wait_reusable(ctx);
        }
        RowStage::wait_stores(ctx);
        ctx.mark(Step::kCombineLanded);
        flag_cell(ctx, c, operation, row, kCellRow);
        ctx.mark(Step::kCombineFlagged);
    }
}

// Rows as they are, in tagged form: a warp takes a segment.
CROSSDOCK_DEVICE void return_tagged(const Ctx& ctx, const LlCombineArgs& args, const LlCombineShared& shared,
                                    const Operation& operation) {
    const LlCommon& c = args.common;
    const int* before = rows_before(ctx, c, shared, true);
    const int segments = static_cast<int>(tagged_segments(args.row_bytes));
    ReceivedRow received;
    CROSSDOCK_ROLLED
    for (int i = ctx.warp_idx() * ctx.num_blocks() + ctx.block_idx(); i < before[c.arena.num_ranks] * segments;
         i += ctx.num_warps() * ctx.num_blocks()) {
        received.advance(before, i / segments);
        const Return row = return_of(args, received);
        if (ctx.warp_broadcast(is_leader(ctx) && wait_credit(ctx, c, operation, row.home) ? 1u : 0u) == 0) continue;
        const uint32_t begin = static_cast<uint32_t>(i % segments) * kTaggedSegmentBytes;
        if (begin == 0 && is_leader(ctx)) note_cell_written(ctx, c, operation, row);
        const uint32_t end = begin + kTaggedSegmentBytes < args.row_bytes ? begin + kTaggedSegmentBytes : args.row_bytes;
        const uint64_t tag = pack_word(operation.epoch, row.row_idx < 0 ? kCellNothing : kCellRow);
        const std::byte* source =
            args.tokens + (row.row_idx < 0 ? 0 : static_cast<uint64_t>(row.row_idx)) * args.row_bytes;
        TaggedWord* words = tagged_row(c, operation, row.home, row.cell);
        CROSSDOCK_ROLLED
        for (uint32_t at = begin + 16 * static_cast<uint32_t>(ctx.lane()); at < end; at += 16 * kLanes) {
            const Bytes16 part = *reinterpret_cast<const Bytes16*>(source + at);
            ctx.store_tagged(words + at / 8, part.low, tag);
            ctx.store_tagged(words + at / 8 + 1, part.high, tag);
        }
        ctx.mark(Step::kCombineStored);
    }
}

// A row that is computed, into a stage: all warps share the rows of a batch.
template <DType kDType>
CROSSDOCK_DEVICE void compute_row(const Ctx& ctx, const LlCombineArgs& args, const Operation& operation,
                                  const Return& row, const RowStage& stage, uint32_t row_first, uint32_t first,
                                  uint32_t bytes, const TermList& terms) {
    const LlCommon& c = args.common;
    if (args.wire == LlCombineWire::kNvfp4) {
        if (first == 0 && row.row_idx >= 0) {
            quantise_nvfp4(ctx, args.tokens + static_cast<uint64_t>(row.row_idx) * args.row_bytes, args.row_bytes / 2,
                           args.row_scales[row.row_idx], stage.data());
        }
        return;
    }
    const RowRecord* record = row_record(c, row.home, row.slot);
    const int32_t* rows = reinterpret_cast<const int32_t*>(record + 1);
    const TaggedWord* weights = weight_words(c, operation, c.rank, row.home, record->token_idx);
    CROSSDOCK_ROLLED
    for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < c.topk; k += kLanes) {
        TaggedWord word = ctx.load_tagged(weights + k / 2);
        const bool came = wait_tagged(ctx, c, operation, WaitStep::kWeights, row.home, weights + k / 2, word);
        terms.index[k] = came ? rows[k] : -1;
        terms.weight[k] = float_of(static_cast<uint32_t>(word.payload >> (32 * (k % 2))));
    }
    ctx.warp_sync();
    sum_rows<kDType>(ctx, {args.tokens, args.row_bytes, terms.index, terms.weight, c.topk},
                     (row_first + first) / dtype_bytes(kDType), bytes / dtype_bytes(kDType),
                     stage.data() - row_first);
    ctx.warp_sync();
}

inline constexpr uint32_t kComputedSegmentBytes = 1024;

// Rows that are computed: a block fills its stages together, then warps send one each.
template <DType kDType>
CROSSDOCK_DEVICE void return_computed(const Ctx& ctx, const LlCombineArgs& args, const LlCombineShared& shared,
                                      const Operation& operation, bool is_tagged) {
    const LlCommon& c = args.common;
    const int* before = rows_before(ctx, c, shared, is_tagged);
    const int total = before[c.arena.num_ranks];
    const int stages = static_cast<int>(c.crew.num_stages);
    const TermList terms = terms_of_warp(ctx, args, shared);
    const auto return_at = [&](int i) {
        ReceivedRow received;
        received.advance(before, i);
        return return_of(args, received);
    };
    CROSSDOCK_ROLLED
    for (int base = ctx.block_idx(); base < total; base += stages * ctx.num_blocks()) {
        const int left = (total - base + ctx.num_blocks() - 1) / ctx.num_blocks();
        const int num = left < stages ? left : stages;
        CROSSDOCK_ROLLED
        for (uint32_t row_first = 0; row_first < args.wire_bytes; row_first += c.crew.chunk_bytes) {
            const uint32_t rest = args.wire_bytes - row_first;
            const uint32_t chunk = rest < c.crew.chunk_bytes ? rest : c.crew.chunk_bytes;
            const int segments = static_cast<int>((chunk + kComputedSegmentBytes - 1) / kComputedSegmentBytes);
            CROSSDOCK_ROLLED
            for (int i = ctx.warp_idx(); i < num * segments; i += ctx.num_warps()) {
                const uint32_t first = static_cast<uint32_t>(i % segments) * kComputedSegmentBytes;
                const uint32_t bytes = chunk - first < kComputedSegmentBytes ? chunk - first : kComputedSegmentBytes;
                compute_row<kDType>(ctx, args, operation, return_at(base + i / segments * ctx.num_blocks()),
                                    stage_of(ctx, shared, static_cast<uint32_t>(i / segments)), row_first, first, bytes,
                                    terms);
            }
            stage_of(ctx, shared, 0).filled();
            ctx.block_sync();
            CROSSDOCK_ROLLED
            for (int i = is_tagged ? 0 : ctx.warp_idx(); i < num; i += is_tagged ? 1 : ctx.num_warps()) {
                const Return row = return_at(base + i * ctx.num_blocks());
                const RowStage stage = stage_of(ctx, shared, static_cast<uint32_t>(i));
                if (ctx.warp_broadcast(is_leader(ctx) && wait_credit(ctx, c, operation, row.home) ? 1u : 0u) == 0)
                    continue;
                const bool is_noted = row_first == 0 && is_leader(ctx) && (!is_tagged || ctx.warp_idx() == 0);
                if (is_noted) note_cell_written(ctx, c, operation, row);
                if (is_tagged) {
                    std::byte* target =
                        reinterpret_cast<std::byte*>(tagged_row(c, operation, row.home, row.cell));
                    store_tagged_rows(ctx, stage.data(), chunk, &target, 1, row_first,
                                      pack_word(operation.epoch, kCellRow));
                } else if (is_leader(ctx)) {
                    if (row.row_idx >= 0) {
                        stage.store(ctx, plain_row(c, operation, row.home, row.cell) + row_first, 0, chunk);
                    }
                    stage.end_group(ctx);
                    RowStage::wait_stores(ctx);
                    stage.wait_reusable(ctx);
                    if (chunk == rest) flag_cell(ctx, c, operation, row, row.row_idx >= 0 ? kCellRow : kCellNothing);
                }
            }
            ctx.block_sync();
        }
    }
}

template <DType kDType>
CROSSDOCK_DEVICE void return_tokens(const Ctx& ctx, const LlCombineArgs& args, const LlCombineShared& shared,
                                    const Operation& operation) {
    const LlCommon& c = args.common;
    if (ctx.block_idx() == ctx.num_blocks() - 1) announce_entered(ctx, c, operation);
    if (args.wire == LlCombineWire::kSums) announce_weights(ctx, args, operation);
    if (has_computed_rows(args)) {
        CROSSDOCK_ROLLED
        for (const bool is_tagged : {true, false}) return_computed<kDType>(ctx, args, shared, operation, is_tagged);
    } else {
        return_tagged(ctx, args, shared, operation);
        return_plain(ctx, args, shared, operation);
    }
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
