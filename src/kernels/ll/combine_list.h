// SPDX-License-Identifier: Apache-2.0
// Combine, send half: which rows go home, from which lists, into which cells; and the weights that go ahead of sums.
#pragma once

#include "device/nvfp4.h"
#include "device/row_stage.h"
#include "device/sum_rows.h"
#include "kernels/ll/far.h"
#include "kernels/ll/line_rows.h"

namespace crossdock {

// Beside the epoch in a cell's flag, or in its words' tags.
enum CellContent : uint64_t { kCellRow = 0, kCellNothing = 1 };  // nothing: the choice had no room at its expert
static_assert(kCellNothing < 1 << kLineContentBits, "a line's tag holds it");

inline namespace CROSSDOCK_VARIANT {

// A warp's list of rows to sum, and the ranks of the choices of the token that it works on.
struct TermList {
    int64_t* index;
    float* weight;
    int32_t* ranks;
};

CROSSDOCK_DEVICE TermList terms_of_warp(const Ctx& ctx, const auto& args, const LlCombineShared& shared) {
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
CROSSDOCK_DEVICE bool has_row_per_choice(const auto& args) {
    return args.common.expert_major && args.wire != LlCombineWire::kSums;
}
// Rows that the kernel computes before they go.
CROSSDOCK_DEVICE bool has_computed_rows(const auto& args) { return args.wire != LlCombineWire::kRows; }
// NVFP4 rows never take the line form: their receiver reads them in another order than they come.
CROSSDOCK_DEVICE bool allows_lines(const auto& args) { return args.wire != LlCombineWire::kNvfp4; }

// A row on its way home.
struct Return {
    int home = 0;
    uint32_t slot =
        0;  // of its token among those of home; with a row a choice: number of the choice among those of home
    int64_t row_idx = 0;  // among all rows here; -1: the choice had no room
    uint32_t cell = 0;
};

// The rows of one form that go home, numbered token by token: row i is the (i / ranks)-th of the home that is i % ranks
// after this rank. So no home is everybody's first, and all ranks send the rows of a token at about the same time.
template <typename Args>
class ReturnList {
  public:
    // counts: i32 [ranks + 1] in shared memory: the homes' rows, and the largest of them.
    CROSSDOCK_DEVICE ReturnList(const Ctx& ctx, const Args& args, bool in_lines)
        : args_(args),
          num_ranks_(static_cast<int>(args.common.arena.num_ranks)),
          counts_(reinterpret_cast<int*>(ctx.shared_memory() + args.shared.return_counts) +
                  (in_lines ? num_ranks_ + 1 : 0)) {}

    // By one warp; followed by a barrier of the block.
    CROSSDOCK_DEVICE static void count(const Ctx& ctx, const Args& args) {
        const ReturnList lists[2] = {{ctx, args, false}, {ctx, args, true}};
        int largest[2] = {0, 0};
        CROSSDOCK_ROLLED
        for (int i = ctx.lane(); i < lists[0].num_ranks_; i += kLanes) {
            const LlReceived received = *received_from(args.common, i);
            const int rows = static_cast<int>(has_row_per_choice(args) ? received.choices : received.rows);
            const bool in_lines = received.lines != 0 && allows_lines(args);
            lists[0].counts_[i] = in_lines ? 0 : rows;
            lists[1].counts_[i] = in_lines ? rows : 0;
            largest[0] = !in_lines && rows > largest[0] ? rows : largest[0];
            largest[1] = in_lines && rows > largest[1] ? rows : largest[1];
        }
        lists[0].counts_[lists[0].num_ranks_] = ctx.warp_max(largest[0]);
        lists[1].counts_[lists[1].num_ranks_] = ctx.warp_max(largest[1]);
    }

    CROSSDOCK_DEVICE int size() const { return counts_[num_ranks_] * num_ranks_; }

    // False: there is no such row, since its home has fewer than others, or what the handle says of it can't be. Its
    // cell is judged later (has_cell), so that the row can be on its way meanwhile.
    CROSSDOCK_DEVICE bool find(int i, Return& row) const {
        const auto& c = args_.common;
        const int number = i / num_ranks_;
        const int home = c.rank + 1 + i - number * num_ranks_;
        row.home = home < num_ranks_ ? home : home - num_ranks_;
        row.slot = static_cast<uint32_t>(number);
        if (number >= counts_[row.home]) return false;
        if (has_row_per_choice(args_)) {
            const LlChoice choice = *choice_of(c, row.home, row.slot);
            row.row_idx = choice.row_idx;
            row.cell = choice.cell;
        } else {
            row.row_idx = static_cast<int64_t>(slot_of(c, row.home, row.slot));
            row.cell = row_record(c, row.home, row.slot)->cell;
        }
        const int64_t num_rows = int64_t{c.offsets.num_slots} * (c.expert_major ? c.offsets.experts_per_rank : 1);
        return !has_row_per_choice(args_) || row.row_idx < num_rows;
    }
    CROSSDOCK_DEVICE bool has_cell(const Return& row) const { return row.cell < args_.common.offsets.num_cells; }

  private:
    const Args& args_;
    int num_ranks_;
    int* counts_;
};

// Of a token, by one warp.
CROSSDOCK_DEVICE void write_weights(const Ctx& ctx, const auto& args, const Operation& operation, uint32_t token,
                                    TaggedWord* words) {
    const uint32_t topk = args.common.topk;
    const float* weights = args.topk_weights + uint64_t{token} * topk;
    CROSSDOCK_ROLLED
    for (uint32_t i = static_cast<uint32_t>(ctx.lane()); 2 * i < topk; i += kLanes) {
        const uint32_t upper = 2 * i + 1 < topk ? bits_of(weights[2 * i + 1]) : 0;
        ctx.store_tagged(words + i, uint64_t{upper} << 32 | bits_of(weights[2 * i]), pack_word(operation.epoch, 0));
    }
}

// The same for ranks elsewhere: the first block puts all tokens' weights to each rank that has any of the tokens.
CROSSDOCK_DEVICE void put_weights(const Ctx& ctx, const auto& args, const Operation& operation) {
    if constexpr (!kHasGinPeers) return;
    const auto& c = args.common;
    if (ctx.block_idx() != 0) return;
    uint32_t* has_tokens = reinterpret_cast<uint32_t*>(ctx.shared_memory() + args.shared.far_ranks);
    const int num_ranks = static_cast<int>(c.arena.num_ranks);
    CROSSDOCK_ROLLED
    for (int rank = thread_idx(ctx); rank < num_ranks; rank += num_threads(ctx)) has_tokens[rank] = 0;
    ctx.block_sync();
    CROSSDOCK_ROLLED
    for (uint32_t i = static_cast<uint32_t>(thread_idx(ctx)); i < c.num_tokens * c.topk;
         i += static_cast<uint32_t>(num_threads(ctx))) {
        const int rank = rank_of_expert(c, expert_id(c, 0, i));
        if (rank >= 0) has_tokens[rank] = 1;
    }
    CROSSDOCK_ROLLED
    for (uint32_t token = static_cast<uint32_t>(ctx.warp_idx()); token < c.num_tokens;
         token += static_cast<uint32_t>(ctx.num_warps())) {
        std::byte* words = in_outbox(c, c.outbox.weights + uint64_t{token} * c.offsets.weight_stride);
        write_weights(ctx, args, operation, token, reinterpret_cast<TaggedWord*>(words));
    }
    ctx.fence_system();
    ctx.block_sync();
    CROSSDOCK_ROLLED
    for (int rank = thread_idx(ctx); rank < num_ranks; rank += num_threads(ctx)) {
        if (has_tokens[rank] == 0 || !is_remote(c.reach, rank) || !wait_credit(ctx, c, operation, rank)) continue;
        put_and_raise(ctx, c.reach, rank, offset_of_weights(c, operation, c.rank), c.outbox.weights,
                      uint64_t{c.num_tokens} * c.offsets.weight_stride,
                      raise_of(c.reach, Signal::kWeights, rank, operation.epoch));
    }
}

// The home ranks' weights go ahead to the ranks that weight and sum before they send: a warp takes a token.
CROSSDOCK_DEVICE void announce_weights(const Ctx& ctx, const auto& args, const Operation& operation) {
    const auto& c = args.common;
    const uint32_t warps = static_cast<uint32_t>(ctx.num_blocks() * ctx.num_warps());
    CROSSDOCK_ROLLED
    for (uint32_t token = static_cast<uint32_t>(ctx.warp_idx() * ctx.num_blocks() + ctx.block_idx());
         token < c.num_tokens; token += warps) {
        CROSSDOCK_ROLLED
        for (uint32_t k = 0; k < c.topk; ++k) {
            const int peer = rank_of_expert(c, expert_id(c, token, k));
            if (peer < 0 || is_remote(c.reach, peer) || !is_first_of_rank(c, token, k, peer)) continue;
            if (ctx.warp_broadcast(is_leader(ctx) && wait_credit(ctx, c, operation, peer) ? 1u : 0u) == 0) continue;
            write_weights(ctx, args, operation, token, weight_words(c, operation, peer, c.rank, token));
        }
    }
}

// Raises the flag of a cell whose row has been stored, or that stays empty.
CROSSDOCK_DEVICE void flag_cell(const Ctx& ctx, const auto& c, const Operation& operation, const Return& row,
                                CellContent content) {
    ctx.store_landed_system(row_flag(c, operation, row.home, row.cell), pack_word(operation.epoch, content));
}

CROSSDOCK_DEVICE void note_cell_written(const Ctx& ctx, const auto& args, const Operation& operation,
                                        const Return& row) {
    const auto& c = args.common;
    ctx.note_slot_written(c.rank, row.home, arena_of(c, row.home), operation.buffer, row.cell, operation.epoch);
    if (row.row_idx >= 0) count_rows(ctx, c.reach, row.home, 1, args.wire_bytes);
}

// The row in the outbox for the turn-th row that goes to other domains from one of the grid's stages: every stage has
// some of its own, which it uses in turn.
CROSSDOCK_DEVICE uint64_t take_outbox_row(const Ctx& ctx, const auto& c, uint32_t stage_of_block, uint32_t turn) {
    const uint32_t stages = c.crew.num_stages * static_cast<uint32_t>(ctx.num_blocks());
    const uint32_t rows_of_stage = c.outbox.num_rows / stages;
    const uint32_t stage = static_cast<uint32_t>(ctx.block_idx()) * c.crew.num_stages + stage_of_block;
    if (turn >= rows_of_stage) flush_network(ctx, c.reach.network);
    return outbox_row(c, turn % rows_of_stage * stages + stage);
}

// A row that this thread has stored in the outbox goes home; what says that it is there comes behind all rows.
CROSSDOCK_DEVICE void put_home(const Ctx& ctx, const auto& c, const Operation& operation, const Return& row,
                               uint64_t outbox, uint32_t bytes) {
    ctx.fence_landed();
    put(ctx, c.reach, row.home, offset_of_row(c, operation, row.cell), outbox, bytes);
}

// A cell that stays empty.
CROSSDOCK_DEVICE void leave_empty(const Ctx& ctx, const auto& c, const Operation& operation, const Return& row) {
    if (is_remote(c.reach, row.home)) {
        put_value(ctx, c.reach, row.home, offset_of_flag(c, operation, row.cell),
                  pack_word(operation.epoch, kCellNothing));
    } else {
        flag_cell(ctx, c, operation, row, kCellNothing);
    }
}

// Behind the rows for ranks elsewhere, to those that have sent here what now goes home: a word that names the
// operation, and the signal.
CROSSDOCK_DEVICE void finish_returns(const Ctx& ctx, const auto& c, const Operation& operation) {
    tell_far_peers(ctx, c, operation, [&](int peer) {
        if (received_from(c, peer)->rows == 0) return;
        put_value_and_raise(ctx, c.reach, peer, offset_of_counts(c, operation, c.rank), pack_word(operation.epoch, 0),
                            raise_of(c.reach, Signal::kData, peer, operation.epoch));
    });
}

}  // namespace CROSSDOCK_VARIANT
}  // namespace crossdock
