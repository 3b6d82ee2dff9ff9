// SPDX-License-Identifier: Apache-2.0
// Combine, send half: which rows return, what they are made of, and where they are stored.
#pragma once

#include "kernels/ll/gin_peers.h"
#include "kernels/ll/ll128.h"
#include "kernels/ll/overlap.h"

namespace crossdock {

// Next to the epoch in a cell's flag, or in its lines' tags.
enum CellContent : uint64_t { kCellRow = 0, kCellNothing = 1 };  // nothing: the choice had no room at its expert
static_assert(kCellNothing < 1 << kLl128ContentBits, "a line's tag holds it");

// Some of the rows that return to GIN peers: as many as the outbox holds, or fewer. None: the rows for LSA peers.
struct CrossingPart {
    uint32_t first = 0;
    uint32_t rows = 0;
};

namespace {

// Which part is sent next. Kernels for one LSA team keep nothing of it.
template <bool kHasGin>
class ChosenPart {
  public:
    CROSSDOCK_DEVICE void choose(const CrossingPart& part) { part_ = part; }
    CROSSDOCK_DEVICE CrossingPart part() const { return part_; }

  private:
    CrossingPart part_;
};
template <>
class ChosenPart<false> {
  public:
    CROSSDOCK_DEVICE void choose(const CrossingPart&) {}
    CROSSDOCK_DEVICE CrossingPart part() const { return {}; }
};

CROSSDOCK_DEVICE SummandLists summands_of_warp(const Ctx& ctx, const auto& args) {
    const uint32_t topk = args.common.topk;
    const uint32_t first = ctx.warp_idx() * topk;
    const uint32_t summands = topk * args.common.warp_layout.warps_per_block;
    const auto all = view_of<SummandLists>(args.shared.summands.in(ctx.shared_memory()), summands);
    return {all.index + first, all.weight + first, all.ranks + first};
}

// Whether one row per choice returns; otherwise one per rank.
CROSSDOCK_DEVICE bool has_row_per_choice(const auto& args) {
    return args.common.expert_major && args.wire != LlCombineWire::kSums;
}
// Whether the kernel computes rows before it sends them.
CROSSDOCK_DEVICE bool has_computed_rows(const auto& args) { return args.wire != LlCombineWire::kRows; }
// Quantised rows are never LL128 rows: the receiver reads them in another order than they arrive.
CROSSDOCK_DEVICE bool allows_ll128(const auto& args) { return !is_quantised(args.wire); }

// The rows of one form that return, numbered token by token: row i is the (i / sources)-th of the source 1 + i %
// sources after this rank, which itself comes last if at all. So ranks do not all begin with the same source, and all
// ranks send the rows of a token at about the same time.
//
// Rows for GIN peers have numbers of their own, in the order of sources, and return in parts.
template <typename Op>
class ReturnList : public ChosenPart<kHasGinPeers> {
  public:
    using ChosenPart<kHasGinPeers>::part;

    CROSSDOCK_DEVICE ReturnList(const Op& op, bool is_ll128)
        : args_(op.args),
          num_ranks_(op.c.arena.num_ranks),
          num_sources_(num_ranks_ - (op.args.own_rows_stay ? 1 : 0)),
          counts_(counts_of(op, is_ll128)),
          first_rows_(first_rows_of(op)) {}

    // One warp; followed by a block barrier.
    CROSSDOCK_DEVICE static void count(const Op& op) {
        uint32_t* const counts[2] = {counts_of(op, false), counts_of(op, true)};
        const uint32_t num_ranks = op.c.arena.num_ranks;
        uint32_t largest[2] = {0, 0};
        for_lanes(op.ctx, num_ranks, [&](uint32_t i) {
            const LlReceived received = *received_from(op.c, i);
            uint32_t rows = has_row_per_choice(op.args) ? rows_of_choices(op, received) : received.rows;
            if (i == op.c.rank && op.args.own_rows_stay) rows = 0;
            const bool is_ll128 = received.returns_as_ll128 != 0 && allows_ll128(op.args);
            if (kHasGinPeers && op.is_gin_peer(i)) {
                counts[0][i] = 0;
                counts[1][i] = rows;
                return;
            }
            counts[0][i] = is_ll128 ? 0 : rows;
            counts[1][i] = is_ll128 ? rows : 0;
            if (is_elastic(op.args)) first_rows_of(op)[i] = received.first_row;
            largest[0] = !is_ll128 && rows > largest[0] ? rows : largest[0];
            largest[1] = is_ll128 && rows > largest[1] ? rows : largest[1];
        });
        counts[0][num_ranks] = op.ctx.warp_max(largest[0]);
        counts[1][num_ranks] = op.ctx.warp_max(largest[1]);
        if constexpr (kHasGinPeers) number_crossing_rows(op, counts[1]);
    }

    CROSSDOCK_DEVICE uint32_t size() const {
        if (kHasGinPeers && part().rows > 0) return part().rows;
        return counts_[num_ranks_] * num_sources_;
    }
    // All rows for GIN peers, and those before a source's.
    CROSSDOCK_DEVICE uint32_t crossing_rows() const { return crossing_before(num_ranks_); }
    CROSSDOCK_DEVICE uint32_t crossing_before(uint32_t source) const { return counts_[num_ranks_ + 1 + source]; }
    // A row's place in the outbox.
    CROSSDOCK_DEVICE uint32_t place_of(const Return& row) const {
        return crossing_before(row.source) + row.i - part().first;
    }
    // The cell of row i of a source. That of the rows behind it follow.
    CROSSDOCK_DEVICE uint32_t cell_at(uint32_t source, uint32_t i) const {
        const auto& c = args_.common;
        return has_row_per_choice(args_) ? choice_of(c, source, i)->cell : row_record(c, source, i)->cell;
    }

    // Returns false if there is no such row because its source has fewer rows than others, or a token fewer choices
    // here, or if the handle's record is invalid. The cell is checked later (has_cell), so that the row's load can
    // already be issued.
    CROSSDOCK_DEVICE bool find(uint32_t i, Return& row) const {
        const auto& c = args_.common;
        if (kHasGinPeers && part().rows > 0) {
            row.source = source_of_crossing(part().first + i);
            row.i = part().first + i - crossing_before(row.source);
        } else {
            const uint32_t number = i / num_sources_;
            const uint32_t source = c.rank + 1 + i - number * num_sources_;
            row.source = source < num_ranks_ ? source : source - num_ranks_;
            row.i = number;
            if (number >= counts_[row.source]) return false;
        }
        if (!has_row_per_choice(args_)) {
            row.row_idx = static_cast<int64_t>(is_elastic(args_) ? first_rows_[row.source] + row.i
                                                                 : slot_of(c, row.source, row.i));
            row.cell = row_record(c, row.source, row.i)->cell;
            return !is_elastic(args_) || c.expert_major || row.row_idx < num_rows_here(args_);
        }
        if (is_elastic(args_)) return find_elastic(row);
        const LlChoice choice = *choice_of(c, row.source, row.i);
        row.row_idx = choice.row_idx;
        row.cell = choice.cell;
        return row.row_idx < num_rows_here(args_);
    }
    CROSSDOCK_DEVICE bool has_cell(const Return& row) const { return row.cell < args_.common.offsets.num_cells; }

  private:
    // One warp. Turns the numbers of GIN peers' rows into those of the rows before them.
    CROSSDOCK_DEVICE static void number_crossing_rows(const Op& op, uint32_t* counts) {
        op.ctx.warp_sync();
        if (!is_leader(op.ctx)) return;
        uint32_t before = 0;
        CROSSDOCK_ROLLED
        for (uint32_t source = 0; source <= op.c.arena.num_ranks; ++source) {
            const uint32_t rows = counts[source];
            counts[source] = before;
            before += rows;
        }
    }
    CROSSDOCK_DEVICE uint32_t source_of_crossing(uint32_t number) const {
        uint32_t source = 0;
        CROSSDOCK_ROLLED
        for (uint32_t end = num_ranks_; end - source > 1;) {
            const uint32_t middle = (source + end) / 2;
            (crossing_before(middle) <= number ? source : end) = middle;
        }
        return source;
    }
    CROSSDOCK_DEVICE static uint32_t rows_of_choices(const Op& op, const LlReceived& received) {
        return is_elastic(op.args) ? received.rows * most_choices(op.c) : received.choices;
    }
    // Of a token, at most.
    CROSSDOCK_DEVICE static uint32_t most_choices(const auto& c) {
        return c.topk < c.offsets.experts_per_rank ? c.topk : c.offsets.experts_per_rank;
    }
    // Elastic rows of choices: the first ones of all tokens, then their second ones, ... So warps find few that are
    // missing between those that are there.
    CROSSDOCK_DEVICE bool find_elastic(Return& row) const {
        const auto& c = args_.common;
        const uint32_t tokens = counts_[row.source] / most_choices(c);
        const uint32_t before = row.i / tokens;  // of the token's choices here
        const RowRecord* record = row_record(c, row.source, row.i - before * tokens);
        const int32_t* rows = reinterpret_cast<const int32_t*>(record + 1);
        uint32_t num = 0;
        CROSSDOCK_ROLLED
        for (uint32_t k = 0; k < c.topk; ++k) {
            if (rows[k] < 0 || num++ < before) continue;
            row.row_idx = rows[k];
            row.cell = cell_of(c, record->token_idx, k);
            return row.row_idx < num_rows_here(args_);
        }
        return false;
    }
    // u32 [ranks + 1] in shared memory: the sources' rows, and the largest of them. With several LSA teams, which have
    // no LL128 rows, the second one has the numbers of GIN peers' rows (crossing_before).
    CROSSDOCK_DEVICE static uint32_t* counts_of(const Op& op, bool is_ll128) {
        return op.args.shared.return_counts.in(op.ctx.shared_memory()) + (is_ll128 ? op.c.arena.num_ranks + 1 : 0);
    }
    // u32 [ranks] behind them. Elastic: the number of a source's first row.
    CROSSDOCK_DEVICE static uint32_t* first_rows_of(const Op& op) {
        return op.args.shared.return_counts.in(op.ctx.shared_memory()) + 2 * (op.c.arena.num_ranks + 1);
    }

    decltype(Op::args) args_;
    uint32_t num_ranks_;
    uint32_t num_sources_;
    uint32_t* counts_;
    uint32_t* first_rows_;
};

CROSSDOCK_DEVICE void note_cell_written(const auto& op, const Return& row) {
    op.note_written(row.source, row.cell);
    if (row.row_idx >= 0) count_rows(op.ctx, op.c.reach, row.source, 1, op.args.wire_bytes);
}

// A row for a GIN peer in the outbox, and what is said of it in front.
CROSSDOCK_DEVICE std::byte* row_in_outbox(const auto& op, const Return& row, const auto& list) {
    return in_outbox(op.c, outbox_row(op, list.place_of(row))) + op.row_front();
}
CROSSDOCK_DEVICE void mark_in_outbox(const auto& op, std::byte* row, CellContent content) {
    op.ctx.store_relaxed_system(reinterpret_cast<uint64_t*>(row - op.row_front()), pack_word(op.epoch, content));
}
// Raises the flag of an LSA peer's cell whose row has been stored, or that stays empty.
CROSSDOCK_DEVICE void flag_cell(const auto& op, const Return& row, CellContent content) {
    op.ctx.store_landed_system(op.flag(row.source, row.cell), pack_word(op.epoch, content));
}
CROSSDOCK_DEVICE void leave_empty(const auto& op, const Return& row, const auto& list) {
    if (!op.is_gin_peer(row.source)) return flag_cell(op, row, kCellNothing);
    mark_in_outbox(op, row_in_outbox(op, row, list), kCellNothing);
}

// Where a plain row is stored: in its cell or, for a GIN peer, in the outbox.
class CellTarget {
  public:
    CROSSDOCK_DEVICE CellTarget(const auto& op, const Return& row, const auto& list) {
        memory_ = op.is_gin_peer(row.source) ? row_in_outbox(op, row, list) : op.row(row.source, row.cell);
    }
    CROSSDOCK_DEVICE std::byte* memory() const { return memory_; }
    // By the thread whose stores have landed.
    CROSSDOCK_DEVICE void finish(const auto& op, const Return& row) const {
        if (!op.is_gin_peer(row.source)) return flag_cell(op, row, kCellRow);
        op.ctx.fence_landed();
        mark_in_outbox(op, memory_, kCellRow);
    }

  private:
    std::byte* memory_;
};

// One warp. Looks up what a row's sum on this rank needs. Without its weight, a row is not summed.
CROSSDOCK_DEVICE void list_summands(const auto& op, const Return& row, const SummandLists& summands) {
    const RowRecord* record = row_record(op.c, row.source, row.i);
    const int32_t* rows = reinterpret_cast<const int32_t*>(record + 1);
    if (is_elastic(op.args)) {
        for_lanes(op.ctx, op.c.topk, [&](uint32_t k) {
            summands.index[k] = static_cast<uint32_t>(rows[k]) < num_rows_here(op.args) ? rows[k] : -1;
            summands.weight[k] = 1.0f;
        });
        return op.ctx.warp_sync();
    }
    const bool may_come =
        !op.is_gin_peer(row.source) || wait_gin_as_warp(op, WaitStep::kWeights, Signal::kWeights, row.source);
    const TaggedWord* weights = op.weights(op.c.rank, row.source, record->token_idx);
    for_lanes(op.ctx, op.c.topk, [&](uint32_t k) {
        uint64_t pair = 0;
        const bool came = may_come && op.wait_tagged(WaitStep::kWeights, row.source, weights + k / 2, pair);
        summands.index[k] = came ? rows[k] : -1;
        summands.weight[k] = float_of(static_cast<uint32_t>(pair >> (32 * (k % 2))));
    });
    op.ctx.warp_sync();
}

// The same without gaps. Returns their number.
CROSSDOCK_DEVICE uint32_t list_present_summands(const auto& op, const Return& row, const SummandLists& summands) {
    list_summands(op, row, summands);
    const Ctx& ctx = op.ctx;
    uint32_t num = 0;
    CROSSDOCK_ROLLED
    for (uint32_t base = 0; has_choices_from(op.c, base); base += kLanes) {
        const uint32_t k = base + ctx.lane();
        const int64_t index = k < op.c.topk ? summands.index[k] : -1;
        const float weight = k < op.c.topk ? summands.weight[k] : 0.0f;
        ctx.warp_sync();
        const uint32_t at = num + ctx.warp_count_before(index >= 0);
        if (index >= 0) {
            summands.index[at] = index;
            summands.weight[at] = weight;
        }
        num += ctx.warp_count(index >= 0);
        ctx.warp_sync();
    }
    return num;
}

}  // namespace
}  // namespace crossdock
