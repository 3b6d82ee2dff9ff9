// SPDX-License-Identifier: Apache-2.0
// Combine, send half: the experts' rows return to the source rank of each token, into that token's own cells.
#pragma once

#include "device/sum_rows.h"
#include "kernels/ll/gin_peers.h"
#include "kernels/ll/ll128.h"
#include "kernels/ll/overlap.h"

namespace crossdock {

// Next to the epoch in a cell's flag, or in its lines' tags.
enum CellContent : uint64_t { kCellRow = 0, kCellNothing = 1 };  // nothing: the choice had no room at its expert
static_assert(kCellNothing < 1 << kLl128ContentBits, "a line's tag holds it");

namespace {

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
template <typename Op>
class ReturnList {
  public:
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
            uint32_t rows = has_row_per_choice(op.args) ? received.choices : received.rows;
            if (i == op.c.rank && op.args.own_rows_stay) rows = 0;
            const bool is_ll128 = received.returns_as_ll128 != 0 && allows_ll128(op.args);
            counts[0][i] = is_ll128 ? 0 : rows;
            counts[1][i] = is_ll128 ? rows : 0;
            if (is_elastic(op.args)) first_rows_of(op)[i] = received.first_row;
            largest[0] = !is_ll128 && rows > largest[0] ? rows : largest[0];
            largest[1] = is_ll128 && rows > largest[1] ? rows : largest[1];
        });
        counts[0][num_ranks] = op.ctx.warp_max(largest[0]);
        counts[1][num_ranks] = op.ctx.warp_max(largest[1]);
    }

    CROSSDOCK_DEVICE uint32_t size() const { return counts_[num_ranks_] * num_sources_; }

    // Returns false if there is no such row because its source has fewer rows than others, or if the handle's record is
    // invalid. The cell is checked later (has_cell), so that the row's load can already be issued.
    CROSSDOCK_DEVICE bool find(uint32_t i, Return& row) const {
        const auto& c = args_.common;
        const uint32_t number = i / num_sources_;
        const uint32_t source = c.rank + 1 + i - number * num_sources_;
        row.source = source < num_ranks_ ? source : source - num_ranks_;
        row.i = number;
        if (number >= counts_[row.source]) return false;
        if (!has_row_per_choice(args_)) {
            row.row_idx = static_cast<int64_t>(is_elastic(args_) ? first_rows_[row.source] + row.i
                                                                 : slot_of(c, row.source, row.i));
            row.cell = row_record(c, row.source, row.i)->cell;
            return !is_elastic(args_) || c.expert_major || row.row_idx < num_rows_here(args_);
        }
        const LlChoice choice = *choice_of(c, row.source, row.i);
        row.row_idx = choice.row_idx;
        row.cell = choice.cell;
        return row.row_idx < num_rows_here(args_);
    }
    CROSSDOCK_DEVICE bool has_cell(const Return& row) const { return row.cell < args_.common.offsets.num_cells; }

  private:
    // u32 [ranks + 1] in shared memory: the sources' rows, and the largest of them.
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

// Raises the flag of an LSA peer's cell whose row has been stored, or that stays empty.
CROSSDOCK_DEVICE void flag_cell(const auto& op, const Return& row, CellContent content) {
    op.ctx.store_landed_system(op.flag(row.source, row.cell), pack_word(op.epoch, content));
}
CROSSDOCK_DEVICE void leave_empty(const auto& op, const Return& row) {
    if (!op.is_gin_peer(row.source)) return flag_cell(op, row, kCellNothing);
    put_value(op.ctx, op.c.reach, row.source, op.flag_offset(row.cell), pack_word(op.epoch, kCellNothing));
}

// Where a plain row is stored: in its cell, or for a GIN peer in a row of the outbox, from which it is put. Every stage
// of the grid has some rows of the outbox, which it uses in turn.
class CellTarget {
  public:
    // turn: the number of this stage's rows that have used the outbox before.
    CROSSDOCK_DEVICE CellTarget(const auto& op, const Return& row, uint32_t stage_of_block, uint32_t turn) {
        if (op.is_gin_peer(row.source)) outbox_ = take_outbox_row(op, stage_of_block, turn);
        memory_ = op.is_gin_peer(row.source) ? in_outbox(op.c, outbox_) : op.row(row.source, row.cell);
    }
    CROSSDOCK_DEVICE std::byte* memory() const { return memory_; }
    // By the thread whose stores have landed. A GIN peer gets one signal after all rows.
    CROSSDOCK_DEVICE void finish(const auto& op, const Return& row, uint32_t bytes) const {
        if (!op.is_gin_peer(row.source)) return flag_cell(op, row, kCellRow);
        op.ctx.fence_landed();
        put(op.ctx, op.c.reach, row.source, op.row_offset(row.cell), outbox_, bytes);
    }

  private:
    CROSSDOCK_DEVICE static uint64_t take_outbox_row(const auto& op, uint32_t stage_of_block, uint32_t turn) {
        const auto& c = op.c;
        const uint32_t stages = c.warp_layout.num_stages * op.blocks();
        const uint32_t rows_of_stage = c.outbox.num_rows / stages;
        const uint32_t stage = op.block() * c.warp_layout.num_stages + stage_of_block;
        if (turn >= rows_of_stage) flush_network(c.reach.network);
        return outbox_row(c, turn % rows_of_stage * stages + stage);
    }

    std::byte* memory_;
    uint64_t outbox_ = 0;
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

// LL128 rows, unchanged or summed here: a warp sends a run of a row's groups of lines.
template <DType kDType, typename Op>
class Ll128Returns {
  public:
    CROSSDOCK_DEVICE explicit Ll128Returns(const Op& op)
        : op_(op), ctx_(op.ctx), args_(op.args), list_(op, true), shape_(op.ctx, op.args.row_bytes) {}

    // Call after a block barrier that follows ReturnList::count. A warp loads its first groups before the operation is
    // known; then every warp calls begin() once, which returns whether anything is sent.
    template <typename Begin>
    CROSSDOCK_DEVICE bool run(Begin begin) {
        const uint32_t step = op_.warps() * op_.c.send_blocks;
        const Ll128Parts parts = Ll128Parts::of(shape_, list_.size(), step);
        const uint32_t num = list_.size() * parts.num;
        const bool has_share = op_.block() < op_.c.send_blocks;
        uint32_t number = has_share ? op_.warp() * op_.c.send_blocks + op_.block() : num;
        Ll128Run run{};  // of `number`, what is left of it
        bool goes = false;
        // The first turn, which calls begin(), is part of this loop, so that the code exists once.
        CROSSDOCK_ROLLED
        for (bool is_first = true, is_new = true;; is_first = false) {
            if (is_new) {
                goes = number < num && list_.find(number / parts.num, row_);
                run = goes ? parts.run(number % parts.num) : Ll128Run{};
            }
            if (goes && !has_computed_rows(args_)) read(run);
            if (is_first && !begin()) return false;
            if (is_new) {
                goes = op_.wait_credit_as_warp(row_.source, goes && list_.has_cell(row_));
                if (goes && run.begin == 0 && is_leader(ctx_)) note_cell_written(op_, row_);
            }
            if (goes && has_computed_rows(args_)) {
                send_sums(run);
                run.begin = run.end;
            } else if (goes) {
                send(run);
                run.begin += kGroupsAtOnce;
            }
            is_new = !goes || run.begin >= run.end;
            if (is_new) number += step;
            if (is_new && number >= num) return true;
        }
    }

    // The same after begin(), while experts still compute. Kept apart from the code of other combines.
    CROSSDOCK_DEVICE_RARE static void run_as_done(const Ctx& ctx, decltype(Op::args) args, Operation operation) {
        const Op op(ctx, args, operation);
        Ll128Returns(op).send_as_done();
    }

  private:
    static constexpr uint32_t kGroupsAtOnce = 8;
    static constexpr uint32_t kGroupsSummedAtOnce = 2;
    static constexpr uint32_t kRowsSummedAtOnce = 4;

    // A warp sends what is done, and asks again for the rest.
    CROSSDOCK_DEVICE void send_as_done() {
        constexpr uint32_t kMostPending = 32;
        const uint32_t step = op_.warps() * op_.c.send_blocks;
        const Ll128Parts parts = Ll128Parts::of(shape_, list_.size(), step);
        const uint32_t num = op_.block() < op_.c.send_blocks ? list_.size() * parts.num : 0;
        ExpertsDone<Op> experts(op_);
        experts.begin();
        CROSSDOCK_ROLLED
        for (uint32_t base = op_.warp() * op_.c.send_blocks + op_.block(); base < num; base += kMostPending * step) {
            const uint32_t left = (num - base + step - 1) / step;
            uint32_t pending = left < kMostPending ? (1u << left) - 1 : ~0u;
            CROSSDOCK_ROLLED
            while (pending != 0) {
                const uint32_t before = pending;
                uint32_t late = 0;
                CROSSDOCK_ROLLED
                for (uint32_t rest = pending; rest != 0; rest &= rest - 1) {
                    const uint32_t bit = rest & (0u - rest);
                    const uint32_t number = base + number_of_ones(bit - 1) * step;
                    const bool is_row = list_.find(number / parts.num, row_);
                    const bool is_late = is_row && is_leader(ctx_) && !experts.has_all(row_, late);
                    if (ctx_.warp_any(is_late)) continue;
                    pending &= ~bit;
                    if (is_row) send_whole(parts.run(number % parts.num));
                }
                if (pending != before) continue;
                if (ctx_.warp_any(is_leader(ctx_) && !experts.may_wait(late))) return;
            }
        }
    }

    // The first groups of a run.
    CROSSDOCK_DEVICE void read(const Ll128Run& run) {
        if (row_.row_idx < 0) return;  // the lines' tags say kCellNothing
        const std::byte* source = args_.tokens + static_cast<uint64_t>(row_.row_idx) * args_.row_bytes;
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kGroupsAtOnce; ++i) {
            if (run.begin + i < run.end) groups_[i].read(shape_, run.begin + i, source);
        }
        ctx_.mark(Step::kCombineLoaded);
    }
    CROSSDOCK_DEVICE void send(const Ll128Run& run) {
        const uint64_t tag = ll128_tag(op_.epoch, row_.row_idx < 0 ? kCellNothing : kCellRow);
        std::byte* lines = op_.row(row_.source, row_.cell) + shape_.offset_in_lines(run.begin);
        ctx_.warp_sync();
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kGroupsAtOnce; ++i) {
            const uint32_t group = run.begin + i;
            groups_[i].store(ctx_, shape_, group, lines + i * Ll128Row::kGroupBytes, tag, group < run.end);
        }
        ctx_.mark(Step::kCombineStored);
    }
    CROSSDOCK_DEVICE void send_whole(Ll128Run run) {
        if (!op_.wait_credit_as_warp(row_.source, list_.has_cell(row_))) return;
        if (run.begin == 0 && is_leader(ctx_)) note_cell_written(op_, row_);
        if (has_computed_rows(args_)) return send_sums(run);
        CROSSDOCK_ROLLED
        for (; run.begin < run.end; run.begin += kGroupsAtOnce) {
            read(run);
            send(run);
        }
    }
    CROSSDOCK_DEVICE void send_sums(const Ll128Run& run) const {
        const uint64_t tag = ll128_tag(op_.epoch, kCellRow);
        std::byte* lines = op_.row(row_.source, row_.cell);
        const SummandLists summands = summands_of_warp(ctx_, args_);
        const uint32_t num = list_present_summands(op_, row_, summands);
        CROSSDOCK_ROLLED
        for (uint32_t first = run.begin; first < run.end; first += kGroupsSummedAtOnce) {
            Ll128Sums<kDType> sums[kGroupsSummedAtOnce];
            CROSSDOCK_ROLLED
            for (uint32_t base = 0; base < num; base += kRowsSummedAtOnce) {
                Ll128Group groups[kRowsSummedAtOnce][kGroupsSummedAtOnce];
                CROSSDOCK_UNROLL
                for (uint32_t r = 0; r < kRowsSummedAtOnce; ++r) {
                    if (base + r >= num) continue;
                    const std::byte* source =
                        args_.tokens + static_cast<uint64_t>(summands.index[base + r]) * args_.row_bytes;
                    CROSSDOCK_UNROLL
                    for (uint32_t g = 0; g < kGroupsSummedAtOnce; ++g) groups[r][g].read(shape_, first + g, source);
                }
                CROSSDOCK_UNROLL
                for (uint32_t r = 0; r < kRowsSummedAtOnce; ++r) {
                    if (base + r >= num) continue;
                    CROSSDOCK_UNROLL
                    for (uint32_t g = 0; g < kGroupsSummedAtOnce; ++g)
                        sums[g].add(groups[r][g], summands.weight[base + r]);
                }
            }
            ctx_.warp_sync();
            CROSSDOCK_UNROLL
            for (uint32_t g = 0; g < kGroupsSummedAtOnce; ++g) {
                sums[g].rounded().store(ctx_, shape_, first + g, lines + shape_.offset_in_lines(first + g), tag,
                                        first + g < run.end);
            }
        }
        ctx_.warp_sync();
        ctx_.mark(Step::kCombineStored);
    }

    const Op& op_;
    const Ctx& ctx_;
    decltype(Op::args) args_;
    ReturnList<Op> list_;
    Ll128Row shape_;
    Return row_;
    Ll128Group groups_[kGroupsAtOnce] = {};
};

// Unchanged plain rows: the leader of each warp with a stage sends one after the other through it.
template <typename Op>
class PlainReturns {
  public:
    CROSSDOCK_DEVICE explicit PlainReturns(const Op& op)
        : op_(op),
          ctx_(op.ctx),
          args_(op.args),
          stage_(stage_of(op.ctx, op.args.shared, op.ctx.warp_idx())),
          list_(op, false),
          experts_(op) {}

    // Starts loading the first row: before the operation is known, unless experts still compute. Call after a block
    // barrier that follows ReturnList::count.
    CROSSDOCK_DEVICE void start() {
        if (waits_for_experts(args_)) experts_.begin();
        number_ = op_.warp() * op_.blocks() + op_.block();
        step_ = op_.c.warp_layout.num_stages * op_.blocks();
        size_ = list_.size();
        find_and_load();
    }
    CROSSDOCK_DEVICE void run() {
        while (number_ < size_) {
            if (!is_there_) {
                // The source has fewer rows than others.
            } else if (row_.row_idx >= 0) {
                send();
            } else if (list_.has_cell(row_) && op_.wait_credit(row_.source)) {
                note_cell_written(op_, row_);
                leave_empty(op_, row_);
            }
            number_ += step_;
            find_and_load();
        }
    }
    // If nothing is sent: waits for the load that was issued, before the stage's memory is freed.
    CROSSDOCK_DEVICE void abandon() {
        if (is_there_ && row_.row_idx >= 0) stage_.wait_loaded(ctx_, round_);
    }

  private:
    CROSSDOCK_DEVICE uint32_t chunk_at(uint32_t first) const {
        const uint32_t left = args_.row_bytes - first;
        return left < op_.c.warp_layout.chunk_bytes ? left : op_.c.warp_layout.chunk_bytes;
    }
    CROSSDOCK_DEVICE const std::byte* source() const {
        return args_.tokens + static_cast<uint64_t>(row_.row_idx) * args_.row_bytes;
    }
    CROSSDOCK_DEVICE void find_and_load() {
        is_there_ = number_ < size_ && list_.find(number_, row_);
        if (is_there_ && waits_for_experts(args_)) is_there_ = experts_.wait_all(row_);
        if (is_there_ && row_.row_idx >= 0) stage_.load(ctx_, source(), chunk_at(0));
    }
    CROSSDOCK_DEVICE void send() {
        const bool has_credit = list_.has_cell(row_) && op_.wait_credit(row_.source);
        const CellTarget target(op_, row_, op_.warp(), turn_);
        if (op_.is_gin_peer(row_.source)) ++turn_;
        if (has_credit) note_cell_written(op_, row_);
        CROSSDOCK_ROLLED
        for (uint32_t first = 0; first < args_.row_bytes; first += op_.c.warp_layout.chunk_bytes) {
            const uint32_t chunk = chunk_at(first);
            if (first > 0) stage_.load(ctx_, source() + first, chunk);
            stage_.wait_loaded(ctx_, round_++);
            ctx_.mark(Step::kCombineLoaded);
            if (has_credit) stage_.store(ctx_, target.memory() + first, 0, chunk);
            RowStage::end_group(ctx_);
            ctx_.mark(Step::kCombineStored);
            stage_.wait_reusable(ctx_);
        }
        if (!has_credit) return;
        RowStage::wait_stores(ctx_);
        ctx_.mark(Step::kCombineLanded);
        target.finish(op_, row_, args_.row_bytes);
        ctx_.mark(Step::kCombineFlagged);
    }

    const Op& op_;
    const Ctx& ctx_;
    decltype(Op::args) args_;
    RowStage stage_;
    ReturnList<Op> list_;
    ExpertsDone<Op> experts_;
    uint32_t number_ = 0;
    uint32_t step_ = 0;
    uint32_t size_ = 0;
    uint32_t round_ = 0;  // loads of the stage
    uint32_t turn_ = 0;   // rows for GIN peers
    bool is_there_ = false;
    Return row_;
};

// Computed plain rows: a block fills its stages together, then warps send one each.
template <DType kDType, typename Op>
class ComputedReturns {
  public:
    CROSSDOCK_DEVICE explicit ComputedReturns(const Op& op)
        : op_(op), ctx_(op.ctx), args_(op.args), list_(op, false), experts_(op) {}

    CROSSDOCK_DEVICE void run() {
        if (waits_for_experts(args_)) experts_.begin();
        const uint32_t blocks = op_.blocks();
        const uint32_t stages = op_.c.warp_layout.num_stages;
        const uint32_t warps = op_.warps();
        const uint32_t warp = op_.warp();
        const uint32_t total = list_.size();
        uint32_t turn = 0;
        CROSSDOCK_ROLLED
        for (uint32_t base = op_.block(); base < total; base += stages * blocks, ++turn) {
            const uint32_t left = (total - base + blocks - 1) / blocks;
            const uint32_t num = left < stages ? left : stages;
            const uint32_t parts = num < warps ? warps / num : 1;  // warps that share a row
            CROSSDOCK_ROLLED
            for (uint32_t row_first = 0; row_first < args_.wire_bytes; row_first += op_.c.warp_layout.chunk_bytes) {
                CROSSDOCK_ROLLED
                for (uint32_t i = warp; i < num * parts; i += warps) {
                    if (list_.find(base + i / parts * blocks, row_) && wait_experts())
                        compute(i / parts, row_first, i % parts, parts);
                }
                RowStage::filled();
                ctx_.block_sync();
                CROSSDOCK_ROLLED
                for (uint32_t i = warp; i < num; i += warps) {
                    const RowStage::Lead lead(ctx_);
                    if (lead && list_.find(base + i * blocks, row_) && list_.has_cell(row_) && are_experts_done() &&
                        op_.wait_credit(row_.source))
                        send(i, row_first, turn);
                }
                ctx_.block_sync();
            }
        }
    }

  private:
    CROSSDOCK_DEVICE uint32_t chunk_at(uint32_t first) const {
        const uint32_t left = args_.wire_bytes - first;
        return left < op_.c.warp_layout.chunk_bytes ? left : op_.c.warp_layout.chunk_bytes;
    }
    // One warp.
    CROSSDOCK_DEVICE bool wait_experts() const {
        if (!waits_for_experts(args_)) return true;
        return ctx_.warp_broadcast(is_leader(ctx_) && experts_.wait_all(row_) ? 1u : 0u) != 0;
    }
    // One thread: after a wait that failed, nothing is sent.
    CROSSDOCK_DEVICE bool are_experts_done() const {
        uint32_t late = 0;
        return !waits_for_experts(args_) || experts_.has_all(row_, late);
    }
    // Computes the row's bytes from row_first on; this warp is the part-th of `parts` that share the row.
    CROSSDOCK_DEVICE void compute(uint32_t stage, uint32_t row_first, uint32_t part, uint32_t parts) const {
        constexpr uint32_t kSegmentBytes = 1024;
        std::byte* target = stage_of(ctx_, args_.shared, stage).data();
        if (is_quantised(args_.wire)) {
            if (part == 0 && row_.row_idx >= 0) {
                quantise_row(ctx_, args_.wire, args_.tokens + static_cast<uint64_t>(row_.row_idx) * args_.row_bytes,
                             args_.row_bytes / 2, args_.row_scales, row_.row_idx, target);
            }
            return;
        }
        const SummandLists summands = summands_of_warp(ctx_, args_);
        list_summands(op_, row_, summands);
        const uint32_t chunk = chunk_at(row_first);
        CROSSDOCK_ROLLED
        for (uint32_t first = part * kSegmentBytes; first < chunk; first += parts * kSegmentBytes) {
            const uint32_t bytes = chunk - first < kSegmentBytes ? chunk - first : kSegmentBytes;
            sum_rows<kDType>(
                ctx_, RowSummands{args_.tokens, args_.row_bytes, summands.index, summands.weight, op_.c.topk},
                (row_first + first) / dtype_bytes(kDType), bytes / dtype_bytes(kDType), target - row_first);
        }
        ctx_.warp_sync();
    }
    CROSSDOCK_DEVICE void send(uint32_t stage, uint32_t row_first, uint32_t turn) const {
        const RowStage from = stage_of(ctx_, args_.shared, stage);
        const uint32_t chunk = chunk_at(row_first);
        const CellTarget target(op_, row_, stage, turn);
        if (row_first == 0) note_cell_written(op_, row_);
        if (row_.row_idx >= 0) from.store(ctx_, target.memory() + row_first, 0, chunk);
        RowStage::end_group(ctx_);
        RowStage::wait_stores(ctx_);
        from.wait_reusable(ctx_);
        if (row_first + chunk < args_.wire_bytes) return;
        if (row_.row_idx >= 0) {
            target.finish(op_, row_, args_.wire_bytes);
        } else {
            leave_empty(op_, row_);
        }
    }

    const Op& op_;
    const Ctx& ctx_;
    decltype(Op::args) args_;
    ReturnList<Op> list_;
    ExpertsDone<Op> experts_;
    Return row_;
};

template <DType kDType, RowForms kForms, typename Op>
class CombineSend {
  public:
    static constexpr KernelSteps kSteps{Step::kCombineBegin, Step::kCombineReady, Step::kCombineHead,
                                        Step::kCombineEnd};

    CROSSDOCK_DEVICE explicit CombineSend(const Op& op)
        : op_(op), ctx_(op.ctx), args_(op.args), c_(op.c), ll128_(op), plain_(op) {}

    CROSSDOCK_DEVICE void init() {
        if (!has_stage()) return;
        stage_of(ctx_, args_.shared, op_.warp()).init();
        RowStage::initialised();
    }
    CROSSDOCK_DEVICE void fetch() {
        if (ctx_.warp_idx() == 0) ReturnList<Op>::count(op_);
    }
    CROSSDOCK_DEVICE void prepare() { empty_outbox(ctx_, c_); }
    template <typename Begin>
    CROSSDOCK_DEVICE bool run(Begin begin) {
        const bool overlaps = waits_for_experts(args_);
        if (sends_plain_rows() && !overlaps) {
            if (const RowStage::Lead lead{ctx_}) plain_.start();
        }
        const auto begin_and_announce = [&] {
            if (!begin()) return false;
            if (is_elastic(args_)) {
                if (args_.elastic.with_weights) return_weights();
            } else if (args_.wire == LlCombineWire::kSums) {
                put_weights();
                announce_weights();
            }
            return true;
        };
        const bool runs = kHasGinPeers || overlaps ? begin_and_announce() : ll128_.run(begin_and_announce);
        if (!runs) {
            if (sends_plain_rows() && !overlaps && is_leader(ctx_)) plain_.abandon();
            return false;
        }
        if (overlaps && !kHasGinPeers) Ll128Returns<kDType, Op>::run_as_done(ctx_, args_, op_);
        if (sends_plain_rows()) {
            if (const RowStage::Lead lead{ctx_}) {
                if (overlaps) plain_.start();
                plain_.run();
            }
        }
        if (kForms == RowForms::kBoth && has_computed_rows(args_)) ComputedReturns<kDType, Op>(op_).run();
        finish_puts();
        return true;
    }

  private:
    // The leaders of a block's first warps have a stage each.
    CROSSDOCK_DEVICE bool has_stage() const { return ctx_.warp_idx() < c_.warp_layout.num_stages && is_leader(ctx_); }
    // The same for all lanes.
    CROSSDOCK_DEVICE bool sends_plain_rows() const {
        return kForms == RowForms::kBoth && !has_computed_rows(args_) && ctx_.warp_idx() < c_.warp_layout.num_stages;
    }

    // One warp. Writes a token's weights.
    CROSSDOCK_DEVICE void write_weights(uint32_t token, TaggedWord* words) const {
        const uint32_t topk = c_.topk;
        const float* weights = args_.topk_weights + uint64_t{token} * topk;
        for_lanes(ctx_, (topk + 1) / 2, [&](uint32_t i) {
            const uint32_t upper = 2 * i + 1 < topk ? bits_of(weights[2 * i + 1]) : 0;
            ctx_.store_tagged(words + i, uint64_t{upper} << 32 | bits_of(weights[2 * i]), pack_word(op_.epoch, 0));
        });
    }
    // Sends this rank's weights to the ranks that weight and sum before they send. One warp per token.
    CROSSDOCK_DEVICE void announce_weights() const {
        const uint32_t warps = op_.blocks() * op_.warps();
        CROSSDOCK_ROLLED
        for (uint32_t token = op_.warp() * op_.blocks() + op_.block(); token < c_.num_tokens; token += warps) {
            CROSSDOCK_ROLLED
            for (uint32_t k = 0; k < c_.topk; ++k) {
                const uint32_t peer = rank_of_expert(c_, expert_id(c_, token, k));
                if (peer == kDropped || op_.is_gin_peer(peer) || !is_first_of_rank(c_, token, k, peer)) continue;
                if (op_.wait_credit_as_warp(peer)) write_weights(token, op_.weights(peer, c_.rank, token));
            }
        }
    }
    // Elastic. Returns the weights of received rows, in the place where other operations get those of this rank's own
    // tokens. One warp per row.
    CROSSDOCK_DEVICE void return_weights() const {
        const uint32_t warps = op_.blocks() * op_.warps();
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < c_.arena.num_ranks; ++i) {
            const uint32_t source = (c_.rank + i) % c_.arena.num_ranks;
            const LlReceived received = *received_from(c_, source);
            const uint32_t rows = received.rows < c_.arena.max_tokens ? received.rows : c_.arena.max_tokens;
            CROSSDOCK_ROLLED
            for (uint32_t row = op_.warp() * op_.blocks() + op_.block(); row < rows; row += warps) {
                const RowRecord* record = row_record(c_, source, row);
                const uint32_t token = record->token_idx;
                if (!op_.wait_credit_as_warp(source, token < c_.arena.max_tokens)) continue;
                const int32_t* places = reinterpret_cast<const int32_t*>(record + 1);
                TaggedWord* words = op_.weights(source, c_.rank, token);
                for_lanes(ctx_, (c_.topk + 1) / 2, [&](uint32_t pair) {
                    const uint64_t lower = returned_weight(received.first_row + row, places, 2 * pair);
                    const uint64_t upper = returned_weight(received.first_row + row, places, 2 * pair + 1);
                    ctx_.store_tagged(words + pair, upper << 32 | lower, pack_word(op_.epoch, 0));
                });
            }
        }
    }
    // The bits of choice k's, 0 if its expert is not here. number: of the row among all received ones.
    CROSSDOCK_DEVICE uint32_t returned_weight(uint32_t number, const int32_t* places, uint32_t k) const {
        if (k >= c_.topk || places[k] == -1) return 0;
        const uint32_t row =
            c_.expert_major ? static_cast<uint32_t>(places[k] >= 0 ? places[k] : -2 - places[k]) : number;
        if (row >= args_.elastic.rows) return 0;
        return bits_of(args_.elastic.weights[c_.expert_major ? row : uint64_t{row} * c_.topk + k]);
    }
    // The same for GIN peers: the first block puts all tokens' weights to each rank that has any of the tokens.
    CROSSDOCK_DEVICE void put_weights() const {
        if constexpr (!kHasGinPeers) return;
        if (ctx_.block_idx() != 0) return;
        uint32_t* has_tokens = args_.shared.gin_ranks.in(ctx_.shared_memory());
        for_threads(ctx_, c_.arena.num_ranks, [&](uint32_t rank) { has_tokens[rank] = 0; });
        ctx_.block_sync();
        for_threads(ctx_, c_.num_tokens * c_.topk, [&](uint32_t i) {
            const uint32_t rank = rank_of_expert(c_, expert_id(c_, 0, i));
            if (rank != kDropped) ctx_.add_shared(has_tokens + rank, 1);
        });
        CROSSDOCK_ROLLED
        for (uint32_t token = op_.warp(); token < c_.num_tokens; token += op_.warps()) {
            std::byte* words = in_outbox(c_, c_.outbox.weights.offset + uint64_t{token} * c_.offsets.weight_stride);
            write_weights(token, reinterpret_cast<TaggedWord*>(words));
        }
        ctx_.fence_system();
        ctx_.block_sync();
        for_threads(ctx_, c_.arena.num_ranks, [&](uint32_t rank) {
            if (has_tokens[rank] == 0 || !op_.is_gin_peer(rank) || !op_.wait_credit(rank)) return;
            put_and_raise(ctx_, c_.reach, rank, op_.weights_offset(c_.rank, 0), c_.outbox.weights.offset,
                          uint64_t{c_.num_tokens} * c_.offsets.weight_stride,
                          raise_to_epoch(op_, Signal::kWeights, rank));
        });
    }
    // After the rows for GIN peers, to each peer whose rows return: a word that names the operation, and the signal.
    CROSSDOCK_DEVICE void finish_puts() const {
        tell_gin_peers(op_, [&](uint32_t peer) {
            if (received_from(c_, peer)->rows == 0) return;
            // Rows of experts that did not come have been left out, and cells of GIN peers have no flags.
            if (waits_for_experts(args_) && has_failed(ctx_, c_.scope)) return;
            put_value_and_raise(ctx_, c_.reach, peer, op_.counts_offset(c_.rank), pack_word(op_.epoch, 0),
                                raise_to_epoch(op_, Signal::kData, peer));
        });
    }

    const Op& op_;
    const Ctx& ctx_;
    decltype(Op::args) args_;
    decltype(Op::c) c_;
    Ll128Returns<kDType, Op> ll128_;
    PlainReturns<Op> plain_;
};

}  // namespace
}  // namespace crossdock
