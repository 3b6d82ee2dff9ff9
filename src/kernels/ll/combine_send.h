// SPDX-License-Identifier: Apache-2.0
// Combine, send half: the experts' rows go back to the rank that each token came from, into that token's own cells.
#pragma once

#include "device/nvfp4.h"
#include "device/row_stage.h"
#include "device/sum_rows.h"
#include "kernels/ll/dispatch_receive.h"

namespace crossdock {

// A row flag's payload.
enum CellContent : uint64_t { kCellRow = 0, kCellNothing = 1 };  // nothing: the choice had no room at its expert

struct LlCombineShared {
    uint32_t rows_before;  // i32 [ranks + 1]
    uint32_t terms;        // i64 [warps][topk], f32 [warps][topk], i32 [warps][topk]
    uint32_t stages;
    uint32_t stage_bytes;
    uint32_t bytes;

    CROSSDOCK_HOST_DEVICE static constexpr LlCombineShared of(const LlCombineArgs& args) {
        const LlCommon& c = args.common;
        LlCombineShared shared{};
        shared.rows_before = 128;
        shared.terms = static_cast<uint32_t>(align_up(128 + uint64_t{4} * (c.arena.num_ranks + 1), 16));
        shared.stages = static_cast<uint32_t>(align_up(shared.terms + uint64_t{16} * c.topk * c.warps_per_block, 128));
        shared.stage_bytes = static_cast<uint32_t>(align_up(uint64_t{128} + c.chunk_bytes, 128));
        shared.bytes = shared.stages + shared.stage_bytes * c.warps_per_block;
        return shared;
    }
};

inline namespace CROSSDOCK_WORLD {

// A warp's list of rows to sum, and the choices of the token that it works on.
struct TermList {
    int64_t* index;
    float* weight;
    int32_t* expert_ids;
};

CROSSDOCK_DEVICE TermList terms_of_warp(const Ctx& ctx, const LlCombineArgs& args, const LlCombineShared& shared) {
    const uint32_t topk = args.common.topk;
    const uint32_t warp = static_cast<uint32_t>(ctx.warp_idx());
    int64_t* index = reinterpret_cast<int64_t*>(ctx.shared_memory() + shared.terms);
    float* weight = reinterpret_cast<float*>(index + uint64_t{topk} * args.common.warps_per_block);
    int32_t* ids = reinterpret_cast<int32_t*>(weight + uint64_t{topk} * args.common.warps_per_block);
    return {index + warp * topk, weight + warp * topk, ids + warp * topk};
}

// Among the distinct ranks of a token's choices, in order of their first choice: the place of a rank that occurs.
CROSSDOCK_DEVICE uint32_t place_of_rank(const LlCommon& c, const int32_t* expert_ids, int rank) {
    uint32_t place = 0;
    for (uint32_t k = 0; rank_of_expert(c, expert_ids[k]) != rank; ++k)
        place += is_first_of_rank(c, expert_ids, k) ? 1 : 0;
    return place;
}

CROSSDOCK_DEVICE uint64_t cell_index(const LlCommon& c, uint32_t token, uint32_t place) {
    return uint64_t{token} * c.arena.cells_per_token + place;
}

// The home rank's weights go ahead to all ranks: they weight and sum before they send.
CROSSDOCK_DEVICE void announce_weights(const Ctx& ctx, const LlCombineArgs& args, const Operation& operation) {
    const LlCommon& c = args.common;
    for (int peer = ctx.warp_idx(); peer < static_cast<int>(c.arena.num_ranks); peer += ctx.num_warps()) {
        if (ctx.warp_broadcast(is_leader(ctx) && wait_credit(ctx, c, operation, peer) ? 1u : 0u) == 0) continue;
        copy_words(ctx, weights_of(c, peer, operation.buffer, c.rank), args.topk_weights, 4 * c.num_tokens * c.topk);
        ctx.fence_system();
        ctx.warp_sync();
        if (is_leader(ctx)) {
            ctx.store_release_system(weight_flag(c, peer, operation.buffer, c.rank), pack_word(operation.epoch, 0));
        }
    }
}

// Raises the flag of a cell whose row has been stored, or that stays empty.
CROSSDOCK_DEVICE void flag_cell(const Ctx& ctx, const LlCommon& c, const Operation& operation, int home, uint64_t cell,
                                CellContent content) {
    ctx.fence_async_copies();
    ctx.store_release_system(row_flag(c, home, operation.buffer, cell), pack_word(operation.epoch, content));
}

// One warp sends one row to a cell of its home rank. fill(first, bytes) puts the wire's bytes [first, first + bytes)
// into the stage.
template <typename Fill>
CROSSDOCK_DEVICE void send_row(const Ctx& ctx, const LlCombineArgs& args, const Operation& operation, RowStage& stage,
                               int home, uint64_t cell, Fill fill) {
    const LlCommon& c = args.common;
    if (is_leader(ctx))
        ctx.note_slot_written(c.rank, home, c.peers.at(home, 0), operation.buffer, cell, operation.epoch);
    std::byte* target = cell_of(c, home, operation.buffer, cell);
    for (uint32_t first = 0; first < args.wire_bytes; first += c.chunk_bytes) {
        const uint32_t left = args.wire_bytes - first;
        const uint32_t chunk = left < c.chunk_bytes ? left : c.chunk_bytes;
        fill(first, chunk);
        if (is_leader(ctx)) {
            stage.store(ctx, target + first, 0, chunk);
            stage.end_group(ctx);
        }
        stage.wait_reusable(ctx);
    }
    if (is_leader(ctx)) {
        stage.wait_stores(ctx);
        flag_cell(ctx, c, operation, home, cell, kCellRow);
    }
}

// An expert's row as it is, or quantised.
CROSSDOCK_DEVICE void send_expert_row(const Ctx& ctx, const LlCombineArgs& args, const Operation& operation,
                                      RowStage& stage, int home, uint64_t cell, uint64_t row_idx) {
    const std::byte* row = args.tokens + row_idx * args.row_bytes;
    send_row(ctx, args, operation, stage, home, cell, [&](uint32_t first, uint32_t bytes) {
        if (args.wire == LlCombineWire::kNvfp4) {
            quantise_nvfp4(ctx, row, args.row_bytes / 2, args.row_scales[row_idx], stage.fill());
            stage.filled(ctx);
        } else {
            stage.load(ctx, row + first, bytes);
            stage.wait_loaded(ctx);
        }
    });
}

// The weighted sum of a token's rows on this rank, rounded once.
template <DType kDType>
CROSSDOCK_DEVICE void send_sum(const Ctx& ctx, const LlCombineArgs& args, const Operation& operation, RowStage& stage,
                               int home, uint64_t cell, uint32_t token, const int32_t* ids, const int32_t* first_rows,
                               const TermList& terms) {
    const LlCommon& c = args.common;
    const float* weights = reinterpret_cast<const float*>(weights_of(c, c.rank, operation.buffer, home));
    for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < c.topk; k += kLanes) {
        terms.index[k] = row_of_choice(c, ids, first_rows, k);
        terms.weight[k] = weights[uint64_t{token} * c.topk + k];
    }
    ctx.warp_sync();
    send_row(ctx, args, operation, stage, home, cell, [&](uint32_t first, uint32_t bytes) {
        const uint32_t first_element = first / dtype_bytes(kDType);
        sum_rows<kDType>(ctx, {args.tokens, args.row_bytes, terms.index, terms.weight, c.topk}, first_element,
                         bytes / dtype_bytes(kDType), stage.fill() - first);
        stage.filled(ctx);
    });
}

// One warp sends back what this rank has of one token.
template <DType kDType>
CROSSDOCK_DEVICE void return_token(const Ctx& ctx, const LlCombineArgs& args, const Operation& operation,
                                   RowStage& stage, const ReceivedRow& row, const TermList& terms) {
    const LlCommon& c = args.common;
    const RowHeader* header = reinterpret_cast<const RowHeader*>(handle_header(c, row.source, row.slot));
    const int32_t* ids = reinterpret_cast<const int32_t*>(header + 1);
    const int32_t* first_rows = handle_first_rows(c, row.source);
    const uint32_t token = header->token_idx;
    if (!c.expert_major || args.wire == LlCombineWire::kSums) {
        const uint64_t cell = cell_index(c, token, place_of_rank(c, ids, c.rank));
        if (c.expert_major) {
            send_sum<kDType>(ctx, args, operation, stage, row.source, cell, token, ids, first_rows, terms);
        } else {
            send_expert_row(ctx, args, operation, stage, row.source, cell,
                            static_cast<uint64_t>(row.source) * c.arena.max_tokens + row.slot);
        }
        return;
    }
    for (uint32_t k = 0; k < c.topk; ++k) {
        if (rank_of_expert(c, ids[k]) != c.rank) continue;
        const int64_t row_idx = row_of_choice(c, ids, first_rows, k);
        if (row_idx >= 0) {
            send_expert_row(ctx, args, operation, stage, row.source, cell_index(c, token, k),
                            static_cast<uint64_t>(row_idx));
        } else if (is_leader(ctx)) {
            ctx.note_slot_written(c.rank, row.source, c.peers.at(row.source, 0), operation.buffer,
                                  cell_index(c, token, k), operation.epoch);
            flag_cell(ctx, c, operation, row.source, cell_index(c, token, k), kCellNothing);
        }
    }
}

template <DType kDType>
CROSSDOCK_DEVICE void return_tokens(const Ctx& ctx, const LlCombineArgs& args, const LlCombineShared& shared,
                                    const Operation& operation, RowStage& stage) {
    const LlCommon& c = args.common;
    const int num_ranks = static_cast<int>(c.arena.num_ranks);
    int* rows_before = reinterpret_cast<int*>(ctx.shared_memory() + shared.rows_before);
    if (args.wire == LlCombineWire::kSums && ctx.block_idx() == ctx.num_blocks() - 1)
        announce_weights(ctx, args, operation);
    if (thread_idx(ctx) == 0) {
        rows_before[0] = 0;
        for (int source = 0; source < num_ranks; ++source)
            rows_before[source + 1] = rows_before[source] + handle_row_counts(c)[source];
    }
    ctx.block_sync();

    const TermList terms = terms_of_warp(ctx, args, shared);
    const int warps = ctx.num_blocks() * ctx.num_warps();
    ReceivedRow row;
    for (int i = ctx.warp_idx() * ctx.num_blocks() + ctx.block_idx(); i < rows_before[num_ranks]; i += warps) {
        row.advance(rows_before, i);
        bool may_send = is_leader(ctx) && wait_credit(ctx, c, operation, row.source);
        if (may_send && args.wire == LlCombineWire::kSums) {
            uint64_t unused = 0;
            may_send = wait_word(ctx, c, operation, WaitStep::kWeights, row.source,
                                 weight_flag(c, c.rank, operation.buffer, row.source), unused);
        }
        if (ctx.warp_broadcast(may_send ? 1u : 0u) == 0) continue;
        return_token<kDType>(ctx, args, operation, stage, row, terms);
        ctx.warp_sync();
    }
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
