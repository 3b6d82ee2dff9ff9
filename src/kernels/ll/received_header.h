// SPDX-License-Identifier: Apache-2.0
// Dispatch, receive half: a row's header, which says what the row is and, with the sources' counts, where it goes.
#pragma once

#include "kernels/ll/waits.h"

namespace crossdock {
namespace {

// The i-th row of a source.
struct ArrivingRow {
    uint32_t source = 0;
    uint32_t i = 0;
};

// A choice in a row's header (RowOrigin).
struct ReceivedChoice {
    uint32_t id;      // of the expert, among all; kDropped
    uint32_t extra;   // expert-major: the number among the source's rows for that expert; rank-major: the weight's bits
    uint32_t expert;  // the same among those here
    bool is_here;

    // exists: a lane without a choice reads another one's.
    CROSSDOCK_DEVICE static ReceivedChoice of(const auto& c, uint64_t payload, bool exists) {
        const uint32_t id = static_cast<uint32_t>(payload);
        const uint32_t expert = id - c.rank * c.offsets.experts_per_rank;
        return {id, static_cast<uint32_t>(payload >> 32), expert, exists && expert < c.offsets.experts_per_rank};
    }
};

// A lane's part of a row's header: the origin, one choice and, with several LSA teams, ReturnCells.
struct Header {
    TaggedWord origin{};
    TaggedWord choice{};
    TaggedWord cells{};
};

CROSSDOCK_DEVICE Placement placement_of_warp(const auto& op) {
    std::byte* placements = op.args.shared.placements.in(op.ctx.shared_memory());
    return view_of<Placement>(placements + view_bytes<Placement>(op.c.topk) * op.warp(), op.c.topk);
}

template <typename Op>
class HeaderReader {
  public:
    CROSSDOCK_DEVICE explicit HeaderReader(const Op& op) : op_(op), ctx_(op.ctx), args_(op.args), c_(op.c) {}

    // With choice base + lane.
    CROSSDOCK_DEVICE Header load(uint32_t source, uint32_t slot, uint32_t base) const {
        const TaggedWord* words = op_.header_from(source, slot);
        const uint32_t k = base + op_.lane();
        return {ctx_.load_tagged(words), ctx_.load_tagged(words + 1 + (k < c_.topk ? k : 0)),
                kHasGinPeers ? ctx_.load_tagged(words + 1 + c_.topk) : TaggedWord{}};
    }
    CROSSDOCK_DEVICE bool has_come(const Header& header) const {
        return ctx_.warp_all(op_.is_of(header.origin) && op_.is_of(header.choice) &&
                             (!kHasGinPeers || op_.is_of(header.cells)));
    }
    CROSSDOCK_DEVICE uint64_t epoch_in(const Header& header) const {
        if (kHasGinPeers && op_.is_of(header.origin) && op_.is_of(header.choice)) return word_epoch(header.cells.tag);
        return word_epoch(op_.is_of(header.origin) ? header.choice.tag : header.origin.tag);
    }
    // look_also: polls further words together with the header, so that their latencies overlap.
    template <typename LookAlso>
    CROSSDOCK_DEVICE bool wait(const ArrivingRow& row, uint32_t base, Header& header, LookAlso look_also) const {
        return wait_as_warp(
            ctx_, c_.scope, op_, WaitStep::kRow,
            [&] {
                header = load(row.source, slot_of(c_, row.source, row.i), base);
                look_also();
                return has_come(header) ? kNoRank : row.source;
            },
            [&] { return epoch_in(header); });
    }

    // One warp. Finds the places of a row. If `writes`, also fills in what the caller and a later combine need. header:
    // with the first choices; read_more(base, header) reads others. Returns false if they do not arrive or are invalid.
    template <typename ReadMore>
    CROSSDOCK_DEVICE bool read(const Announced& announced, const ArrivingRow& row, Header header, bool writes,
                               const Placement& placement, ReadMore read_more) const {
        const uint32_t slot = slot_of(c_, row.source, row.i);
        RowRecord* record = row_record(c_, row.source, row.i);
        uint32_t num = 0;      // output rows so far
        uint32_t choices = 0;  // for experts here so far
        CROSSDOCK_ROLLED
        for (uint32_t base = 0; has_choices_from(c_, base); base += kLanes) {
            const uint32_t k = base + op_.lane();
            const bool is_choice = k < c_.topk;
            if (base > 0 && !read_more(base, header)) return false;
            const RowOrigin origin = RowOrigin::of(header.origin.payload);
            const ReceivedChoice choice = ReceivedChoice::of(c_, header.choice.payload, is_choice);
            const uint32_t number = origin.first_choice + choices + ctx_.warp_count_before(choice.is_here);
            if (!ctx_.warp_all(expect_origin(row.source, origin, c_.expert_major && choice.is_here ? number : 0)))
                return false;
            if (kHasGinPeers && !ctx_.warp_all(expect_cells(row.source, origin, header, choice.is_here, number)))
                return false;
            if (base == 0 && is_leader(ctx_)) {
                *placement.direct = origin.direct == args_.direct ? args_.direct : 0;
                if (writes) record_origin(row, slot, origin, cell_of_row(origin, header), record);
            }
            int32_t row_idx = -1;
            if (c_.expert_major) {
                if (choice.is_here) row_idx = row_of_choice(announced, row.source, choice);
                if (writes && choice.is_here) record_choice(row, header, origin, k, number, row_idx);
                if (writes && is_choice) reinterpret_cast<int32_t*>(record + 1)[k] = row_idx;
                choices += ctx_.warp_count(choice.is_here);
            } else if (writes && is_choice) {
                tell_choice(slot, k, choice);
            }
            const uint32_t at = num + ctx_.warp_count_before(row_idx >= 0);
            if (row_idx >= 0) placement.rows[at] = static_cast<uint32_t>(row_idx);
            if (row_idx >= 0 && args_.transposed_scales)
                placement.columns[at] = static_cast<uint32_t>(row_idx) - choice.expert * c_.offsets.num_slots;
            num += ctx_.warp_count(row_idx >= 0);
        }
        if (!c_.expert_major) {
            place_by_rank(announced, row, placement);
        } else if (is_leader(ctx_)) {
            *placement.num = num;
        }
        ctx_.warp_sync();
        return true;
    }
    // Rank-major. Followed by a warp barrier.
    CROSSDOCK_DEVICE void place_by_rank(const Announced& announced, const ArrivingRow& row,
                                        const Placement& placement) const {
        if (!is_leader(ctx_)) return;
        const uint32_t at = is_elastic(args_) ? number_of(announced, row) : slot_of(c_, row.source, row.i);
        *placement.num = is_elastic(args_) && at >= args_.elastic.rows ? 0 : 1;
        placement.rows[0] = at;
        if (args_.transposed_scales) placement.columns[0] = at;
    }
    // Elastic: the row's number among all received tokens.
    CROSSDOCK_DEVICE uint32_t number_of(const Announced& announced, const ArrivingRow& row) const {
        return announced.rows_before[row.source] + row.i;
    }
    // Checks a row's origin and the number of a choice.
    CROSSDOCK_DEVICE bool expect_origin(uint32_t source, const RowOrigin& origin, uint32_t choice) const {
        return (origin.token_idx < c_.arena.max_tokens && origin.target_idx < c_.arena.cells_per_token &&
                choice < c_.handle.choices_of_source) ||
               refuse_origin(ctx_, args_, op_, source, origin, choice);
    }
    // Checks a row's cells, and that of a choice.
    CROSSDOCK_DEVICE bool expect_cells(uint32_t source, const RowOrigin& origin, const Header& header, bool is_choice,
                                       uint32_t number) const {
        const ReturnCells first = ReturnCells::of(header.cells.payload);
        const uint64_t of_choice =
            c_.expert_major && is_choice ? uint64_t{first.choice} + (number - origin.first_choice) : 0;
        return op_.expect(PeerNumber::kCell, source, c_.offsets.num_cells - 1,
                          of_choice > first.row ? of_choice : first.row);
    }
    // For a later combine: where a row returns to, and rank-major the place of this rank's own row.
    CROSSDOCK_DEVICE void record_origin(const ArrivingRow& row, uint32_t place, const RowOrigin& origin, uint32_t cell,
                                        RowRecord* record) const {
        *record = {origin.token_idx, cell};
        if (!c_.expert_major && row.source == c_.rank) *own_row(c_, origin.token_idx, 0) = static_cast<int32_t>(place);
    }

    // The cell of the row that returns for a row, if one per rank does.
    CROSSDOCK_DEVICE uint32_t cell_of_row(const RowOrigin& origin, const Header& header) const {
        if constexpr (kHasGinPeers) return ReturnCells::of(header.cells.payload).row;
        return cell_of(c_, origin.token_idx, origin.target_idx);
    }

  private:
    // The same of choice k, if one per choice does. number: of the source's choices of experts here.
    CROSSDOCK_DEVICE uint32_t cell_of_choice(const RowOrigin& origin, const Header& header, uint32_t k,
                                             uint32_t number) const {
        if constexpr (kHasGinPeers) return ReturnCells::of(header.cells.payload).choice + number - origin.first_choice;
        return cell_of(c_, origin.token_idx, k);
    }
    // The output row of a received row's choice of an expert here; -1 past the expert's capacity (only repeated ids can
    // exceed it).
    CROSSDOCK_DEVICE int32_t row_of_choice(const Announced& announced, uint32_t source,
                                           const ReceivedChoice& choice) const {
        const uint64_t row_of_expert =
            uint64_t{announced.first_rows[source * c_.offsets.experts_per_rank + choice.expert]} + choice.extra;
        return row_of_expert < c_.offsets.num_slots
                   ? static_cast<int32_t>(choice.expert * c_.offsets.num_slots + row_of_expert)
                   : -1;
    }
    // For a later combine, expert-major: the row of a choice of an expert here. number: of the source's such choices.
    CROSSDOCK_DEVICE void record_choice(const ArrivingRow& row, const Header& header, const RowOrigin& origin,
                                        uint32_t k, uint32_t number, int32_t row_idx) const {
        *choice_of(c_, row.source, number) = {row_idx, cell_of_choice(origin, header, k, number)};
        if (row.source == c_.rank) *own_row(c_, origin.token_idx, k) = row_idx;
    }
    // For the caller, rank-major.
    CROSSDOCK_DEVICE void tell_choice(uint32_t slot, uint32_t k, const ReceivedChoice& choice) const {
        const uint32_t id = args_.global_ids ? choice.id : choice.expert;
        args_.out_topk_idx[uint64_t{slot} * c_.topk + k] = static_cast<int32_t>(choice.is_here ? id : kDropped);
        args_.out_weights[uint64_t{slot} * c_.topk + k] = float_of(choice.extra);
    }

    // Records which of them is out of range. Always returns false.
    CROSSDOCK_DEVICE_RARE static bool refuse_origin(const Ctx& ctx, decltype(Op::args) args, Operation operation,
                                                    uint32_t source, RowOrigin origin, uint32_t choice) {
        const auto& c = args.common;
        const auto expect = [&](PeerNumber number, uint64_t most, uint64_t seen) {
            if (seen > most) refuse_number(ctx, c, operation, number, source, most, seen);
            return seen <= most;
        };
        return expect(PeerNumber::kToken, c.arena.max_tokens - 1, origin.token_idx) &&
               expect(PeerNumber::kTarget, c.arena.cells_per_token - 1, origin.target_idx) &&
               expect(PeerNumber::kChoices, c.handle.choices_of_source, uint64_t{choice} + 1);
    }
    const Op& op_;
    const Ctx& ctx_;
    decltype(Op::args) args_;
    decltype(Op::c) c_;
};

}  // namespace
}  // namespace crossdock
