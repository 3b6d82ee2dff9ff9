// SPDX-License-Identifier: Apache-2.0
// Combine, send half: the experts' rows return to the source rank of each token, into that token's own cells.
#pragma once

#include "kernels/ll/combine_send_plain.h"
#include "kernels/ll/combine_staged.h"
#include "kernels/ll/combine_weights.h"

namespace crossdock {
namespace {

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
    static constexpr uint32_t kLooksPerSweep = 8;

    // Each lane looks after a part of a row. The warp sends those that are done, and looks again for the rest. Parts
    // are small, so that many warps share the rows that are done last.
    CROSSDOCK_DEVICE void send_as_done() {
        const uint32_t step = op_.warps() * op_.c.send_blocks;
        const uint32_t loads = list_.size() * ((shape_.groups() + kGroupsAtOnce - 1) / kGroupsAtOnce);
        const uint32_t lanes = step * kLanes;
        const uint32_t most = loads < lanes ? loads : lanes;
        const Ll128Parts parts = Ll128Parts::of(shape_, list_.size(), most > step ? most : step);
        const uint32_t num = op_.block() < op_.c.send_blocks ? list_.size() * parts.num : 0;
        ExpertsDone<Op> experts(op_);
        experts.begin();
        CROSSDOCK_ROLLED
        for (uint32_t base = op_.warp() * op_.c.send_blocks + op_.block(); base < num; base += lanes) {
            const uint32_t number = base + ctx_.lane() * step;
            Return row;
            bool is_pending = number < num && list_.find(number / parts.num, row);
            uint32_t late = 0;
            CROSSDOCK_ROLLED
            for (uint32_t looks = 0; ctx_.warp_any(is_pending); ++looks) {
                // Blocks mostly come in order, and many looks at many counters slow down the kernel that adds to them.
                const uint32_t to_end = is_pending ? ~experts.block_of(late) : 0;
                const uint32_t most_to_end = ctx_.warp_max(to_end);
                const bool is_first = is_pending && to_end == most_to_end;
                const bool is_done =
                    is_pending && (is_first || looks % kLooksPerSweep == 0) && experts.has_all(row, late);
                is_pending = is_pending && !is_done;
                const uint32_t done = ctx_.warp_ballot(is_done);
                if (done == 0 && ctx_.warp_any(is_first && !experts.may_wait(late))) return;
                ctx_.warp_sync();
                CROSSDOCK_ROLLED
                for (uint32_t rest = done; rest != 0; rest &= rest - 1) {
                    const uint32_t lane = number_of_ones((rest & (0u - rest)) - 1);
                    row_ = row_of(lane, row);
                    send_whole(parts.run((base + lane * step) % parts.num));
                }
            }
        }
    }
    // That lane's row.
    CROSSDOCK_DEVICE Return row_of(uint32_t lane, const Return& row) const {
        const auto idx = static_cast<uint64_t>(row.row_idx);
        const uint64_t upper = ctx_.warp_broadcast_from(lane, static_cast<uint32_t>(idx >> 32));
        const uint64_t lower = ctx_.warp_broadcast_from(lane, static_cast<uint32_t>(idx));
        return {ctx_.warp_broadcast_from(lane, row.source), ctx_.warp_broadcast_from(lane, row.i),
                static_cast<int64_t>(upper << 32 | lower), ctx_.warp_broadcast_from(lane, row.cell)};
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

template <DType kDType, RowForms kForms, typename Op>
class CombineSend {
  public:
    static constexpr KernelSteps kSteps{Step::kCombineBegin, Step::kCombineReady, Step::kCombineHead,
                                        Step::kCombineEnd};

    CROSSDOCK_DEVICE explicit CombineSend(const Op& op)
        : op_(op), ctx_(op.ctx), args_(op.args), c_(op.c), ll128_(op), plain_(op), weights_(op) {}

    CROSSDOCK_DEVICE void init() {
        if (kForms == RowForms::kBoth && StagedSums<kDType, Op>::are_used(args_) && is_leader(ctx_))
            StagedSums<kDType, Op>::init(ctx_, args_);
        if (!has_stage()) return;
        stage_of(ctx_, args_.shared, op_.warp()).init();
        RowStage::initialised();
    }
    CROSSDOCK_DEVICE void fetch() {
        if (ctx_.warp_idx() == 0) ReturnList<Op>::count(op_);
    }
    CROSSDOCK_DEVICE void prepare() {}
    template <typename Begin>
    CROSSDOCK_DEVICE bool run(Begin begin) {
        const bool overlaps = waits_for_experts(args_);
        const bool starts_early = !overlaps && !kHasGinPeers;
        if (sends_plain_rows() && starts_early) {
            if (const RowStage::Lead lead{ctx_}) plain_.start();
        }
        const auto begin_and_announce = [&] {
            if (!begin()) return false;
            if (is_elastic(args_)) {
                if (args_.elastic.with_weights) weights_.give_back();
            } else if (args_.wire == LlCombineWire::kSums) {
                weights_.put_all();
                weights_.announce();
            }
            return true;
        };
        const bool runs = kHasGinPeers || overlaps ? begin_and_announce() : ll128_.run(begin_and_announce);
        if (!runs) {
            if (sends_plain_rows() && starts_early && is_leader(ctx_)) plain_.abandon();
            return false;
        }
        if (overlaps && !kHasGinPeers) Ll128Returns<kDType, Op>::run_as_done(ctx_, args_, op_);
        if constexpr (kHasGinPeers) {
            send_parts();
        } else {
            send_rows(!overlaps);
        }
        return true;
    }

  private:
    // The leaders of a block's first warps have a stage each.
    CROSSDOCK_DEVICE bool has_stage() const { return ctx_.warp_idx() < c_.warp_layout.num_stages && is_leader(ctx_); }
    // The same for all lanes.
    CROSSDOCK_DEVICE bool sends_plain_rows() const {
        return kForms == RowForms::kBoth && !has_computed_rows(args_) && ctx_.warp_idx() < c_.warp_layout.num_stages;
    }

    CROSSDOCK_DEVICE void send_rows(bool has_started, const CrossingPart& part = {}) {
        if (sends_plain_rows()) {
            if (const RowStage::Lead lead{ctx_}) {
                if (!has_started) plain_.start();
                plain_.run();
            }
        }
        if (kForms == RowForms::kBoth && has_computed_rows(args_)) ComputedReturns<kDType, Op>(op_, part).run();
    }
    // Groups of several LSA teams. Rows for GIN peers first, since they take longest, as many at a time as the outbox
    // holds.
    CROSSDOCK_DEVICE void send_parts() {
        const uint32_t crossing = ReturnList<Op>(op_, false).crossing_rows();
        const uint32_t most = c_.outbox.num_rows;
        CROSSDOCK_ROLLED
        for (CrossingPart part;; part.first += part.rows) {
            part.rows = crossing - part.first < most ? crossing - part.first : most;
            plain_.choose(part);
            send_rows(false, part);
            if (part.rows == 0 || !put_part(part)) return;
        }
    }
    // Puts the rows of a part, all those for one peer together. After a peer's last ones: a word that names the
    // operation, and the signal. Returns false if the group has failed, so that the outbox may still be in use.
    CROSSDOCK_DEVICE bool put_part(const CrossingPart& part) const {
        const ReturnList<Op> list(op_, false);
        const uint32_t end = part.first + part.rows;
        const auto tell = [&](uint32_t peer) {
            // Rows of experts that did not come have been left out.
            if (waits_for_experts(args_) && has_failed(ctx_, c_.scope)) return;
            const uint32_t first_of_peer = list.crossing_before(peer);
            const uint32_t end_of_peer = list.crossing_before(peer + 1);
            const uint32_t from = first_of_peer < part.first ? part.first : first_of_peer;
            const uint32_t to = end_of_peer < end ? end_of_peer : end;
            if (from >= to) return;
            const uint64_t cell = list.cell_at(peer, from - first_of_peer);
            if (cell + (to - from) > c_.offsets.num_cells) return;  // as ReturnList::has_cell
            put(ctx_, c_.reach, peer, op_.slot_offset(static_cast<uint32_t>(cell)), outbox_row(op_, from - part.first),
                uint64_t{to - from} * op_.row_stride());
            if (to < end_of_peer) return;
            put_value_and_raise(ctx_, c_.reach, peer, op_.counts_offset(c_.rank), pack_word(op_.epoch, 0),
                                raise_to_epoch(op_, Signal::kData, peer));
        };
        if (end < list.crossing_rows()) return tell_and_empty_outbox(op_, tell);
        tell_gin_peers(op_, tell);
        return true;
    }

    const Op& op_;
    const Ctx& ctx_;
    decltype(Op::args) args_;
    decltype(Op::c) c_;
    Ll128Returns<kDType, Op> ll128_;
    PlainReturns<Op> plain_;
    CombineWeights<Op> weights_;
};

}  // namespace
}  // namespace crossdock
