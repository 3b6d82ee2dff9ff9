// SPDX-License-Identifier: Apache-2.0
// Dispatch, receive half: every row is placed at its expert (expert-major) or its source (rank-major) as soon as it has
// arrived, in the order (source rank, token, k). At the end: the kernel.
#pragma once

#include "device/row_copy.h"
#include "kernels/counters.h"
#include "kernels/ll/dispatch_send.h"

namespace crossdock {
namespace {

// The sources' announced counts, in shared memory.
struct Announced {
    uint32_t* rows;          // [ranks]
    uint32_t* choices;       // [ranks] of experts here; expert-major
    uint32_t* plain_before;  // [ranks + 1]: plain rows in the buffer of the sources below
    uint32_t* ll128;         // [ranks]: LL128 rows; then the largest number of them
    uint32_t* first_rows;    // [ranks][local experts]: where a source's rows of an expert begin; expert-major
    // Elastic.
    uint32_t* rows_before;  // [ranks + 1]: rows of the sources below
    uint32_t* expert_rows;  // [local experts]
    uint32_t* padded_rows;  // [local experts]: rounded up to the alignment
    uint32_t* zones;        // [local experts]: where an expert's rows begin
};

// A lane's part of a source's counts: the rows, and the choices of some experts.
struct CountsOfLane {
    uint64_t rows = 0;
    uint64_t choices[kExpertsAtOnce] = {};
};

// The i-th row of a source.
struct ArrivingRow {
    uint32_t source = 0;
    uint32_t i = 0;
};

// The rows announced for this warp, and those that arrived.
struct RowsRead {
    uint64_t expected = 0;
    uint64_t read = 0;
};

// One thread, after a barrier with those that wrote the counters. Writes where experts' rows begin among all rows, and
// the total.
CROSSDOCK_DEVICE_RARE void tell_places(const auto& args, Announced announced) {
    const auto& c = args.common;
    const uint32_t num = c.expert_major ? c.offsets.experts_per_rank : c.arena.num_ranks;
    uint32_t total = 0;
    CROSSDOCK_ROLLED
    for (uint32_t i = 0; i < num; ++i) {
        total += c.expert_major ? static_cast<uint32_t>(args.counters[i]) : announced.rows[i];
        if (c.expert_major) write_counter(args.offsets, args.offsets_are_64_bit, i, i * c.offsets.num_slots);
    }
    write_counter(args.total, args.total_is_64_bit, 0, total);
}

// Treats a source as one that sends nothing; if the group has failed, nothing is received.
CROSSDOCK_DEVICE_RARE void forget_source(const Ctx& ctx, const auto& c, Announced announced, uint32_t source) {
    if (has_failed(ctx, c.scope)) ctx.add_shared(&block_head(ctx).is_refused, 1);
    ctx.warp_sync();
    const uint32_t experts = c.expert_major ? c.offsets.experts_per_rank : 0;
    for_lanes(ctx, experts, [&](uint32_t i) { announced.first_rows[source * experts + i] = 0; });
    announced.rows[source] = announced.ll128[source] = announced.choices[source] = 0;
    ctx.warp_sync();
}

template <typename Op>
class DispatchReceive {
  public:
    using Send = DispatchSend<Op>;
    CROSSDOCK_DEVICE DispatchReceive(const Op& op, const Send& send)
        : op_(op), send_(send), ctx_(op.ctx), args_(op.args), c_(op.c) {}

    CROSSDOCK_DEVICE void fetch() {}
    CROSSDOCK_DEVICE void look_ahead() {}

    CROSSDOCK_DEVICE void run(const WorkShare& share, bool) {
        const Announced announced = announced_here();
        const uint32_t first_choice = first_choice_of_own_row(share);
        gather_counts(announced, share);
        if (block_head(ctx_).is_refused != 0) return ctx_.note_unread_slots_allowed();
        if (is_elastic(args_)) {
            place_experts(announced, share);
        } else if (c_.expert_major) {
            scan_experts(announced, share);
        }
        publish_counts(announced, share);
        ctx_.mark(Step::kDispatchCounts);

        RowsRead rows;
        const auto add = [&](const RowsRead& more) {
            rows.expected += more.expected;
            rows.read += more.read;
        };
        add(place_own_row(announced, share, first_choice));
        const bool has_ll128 = !kHasGinPeers && announced.ll128[c_.arena.num_ranks] > 0;
        const bool has_plain = announced.plain_before[c_.arena.num_ranks] > 0;
        // If this rank's own form is known, sources with another number of tokens may still send the other one.
        if (!kHasGinPeers && c_.kForm != LlForm::kPlain) {
            add(receive_ll128_rows(announced, share));
        } else if (has_ll128) {
            add(receive_other_form(ctx_, args_, op_, announced, share));
        }
        if (c_.kForm != LlForm::kLl128) {
            add(receive_plain_rows(announced, share));
        } else if (has_plain) {
            add(receive_other_form(ctx_, args_, op_, announced, share));
        }
        if (is_leader(ctx_)) ctx_.note_operation_read(c_.rank, op_.epoch, rows.expected, rows.read);
        ctx_.warp_sync();
    }

  private:
    // The stages begin with load 0 again: kernels that know their own form have not used them for the other form and,
    // without masks, receive once.
    CROSSDOCK_DEVICE_RARE static RowsRead receive_other_form(const Ctx& ctx, decltype(Op::args) args,
                                                             Operation operation, Announced announced,
                                                             WorkShare share) {
        const Op op(ctx, args, operation);
        const Send send(op);
        DispatchReceive receive(op, send);
        return op.c.kForm == LlForm::kLl128 ? receive.receive_plain_rows(announced, share)
                                            : receive.receive_ll128_rows(announced, share);
    }

    CROSSDOCK_DEVICE Announced announced_here() const {
        const uint32_t stride = c_.arena.num_ranks + 1;
        const uint32_t experts = c_.offsets.experts_per_rank;
        uint32_t* received = args_.shared.received.in(ctx_.shared_memory());
        uint32_t* zones = args_.shared.zones.in(ctx_.shared_memory());
        return {received,
                received + stride,
                received + 2 * stride,
                received + 3 * stride,
                args_.shared.first_rows.in(ctx_.shared_memory()),
                received + 4 * stride,
                zones,
                zones + experts,
                zones + 2 * experts};
    }
    CROSSDOCK_DEVICE Placement placement_of_warp() const {
        std::byte* placements = args_.shared.placements.in(ctx_.shared_memory());
        return view_of<Placement>(placements + view_bytes<Placement>(c_.topk) * op_.warp(), c_.topk);
    }
    // Elastic: the block that tells the caller how many rows experts have. Rank-major, where no other block reads these
    // counts, it is the one with the least other work.
    CROSSDOCK_DEVICE bool tells_experts(const WorkShare& share) const {
        return is_elastic(args_) && share.block == (c_.expert_major ? 0 : share.num_blocks - 1);
    }
    // The number of experts whose choices are read.
    CROSSDOCK_DEVICE uint32_t counted_experts(const WorkShare& share) const {
        return c_.expert_major || tells_experts(share) ? c_.offsets.experts_per_rank : 0;
    }

    // Counts.

    // Waits for a GIN peer's signal: then all its data has arrived. Without rows it puts only the first count.
    CROSSDOCK_DEVICE bool has_gin_rows(uint32_t source) const {
        if (!wait_gin_as_warp(op_, WaitStep::kCounts, Signal::kData, source)) return false;
        CountsOfLane counts;
        wait_counts(source, 0, 0, counts);
        return counts.rows % kLl128Rows != 0;
    }

    // Counts of experts first + lane + i * kLanes below `experts`: all are polled together with the source's entry.
    // Relaxed loads suffice, since no other data is ordered after these words.
    CROSSDOCK_DEVICE bool wait_counts(uint32_t source, uint32_t first, uint32_t experts, CountsOfLane& counts) const {
        if (!op_.is_active_here(source)) return false;
        const uint64_t* words = op_.counts(c_.rank, source);
        TaggedWord entry{};
        const auto expert_at = [&](uint32_t i) { return first + op_.lane() + i * kLanes; };
        const bool came = poll_until(
            ctx_,
            [&] {
                entry = op_.load_entry_of(source);
                counts.rows = ctx_.load_relaxed_system(words);
                uint64_t other = word_epoch(counts.rows);
                CROSSDOCK_UNROLL
                for (uint32_t i = 0; i < kExpertsAtOnce; ++i) {
                    if (expert_at(i) < experts) counts.choices[i] = ctx_.load_relaxed_system(words + 1 + expert_at(i));
                }
                CROSSDOCK_UNROLL
                for (uint32_t i = 0; i < kExpertsAtOnce; ++i) {
                    if (expert_at(i) < experts && word_epoch(counts.choices[i]) != op_.epoch)
                        other = word_epoch(counts.choices[i]);
                }
                return other;
            },
            [&](uint64_t epoch) { return epoch == op_.epoch && op_.is_alike(entry); },
            [&](uint64_t seen) { return Op::may_await(ctx_, args_, op_, WaitStep::kCounts, source, seen); });
        counts.rows = came ? word_payload(counts.rows) : 0;
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kExpertsAtOnce; ++i)
            counts.choices[i] = came && expert_at(i) < experts ? word_payload(counts.choices[i]) : 0;
        return came;
    }

    // Waits for every source's counts and checks them. Masked sources, and those with wrong counts, send nothing.
    CROSSDOCK_DEVICE void gather_counts(const Announced& announced, const WorkShare& share) const {
        const uint32_t experts = counted_experts(share);
        const uint32_t most_choices = c_.handle.choices_of_source;
        CROSSDOCK_ROLLED
        for (uint32_t source = share.warp(ctx_); source < c_.arena.num_ranks; source += share.warps) {
            const bool is_silent = op_.is_gin_peer(source) && !has_gin_rows(source);
            bool is_right = true;
            uint64_t choices = 0;
            CountsOfLane counts;
            CROSSDOCK_ROLLED
            for (uint32_t first = 0; first == 0 || first < experts; first += kExpertsAtOnce * kLanes) {
                is_right &= !is_silent && wait_counts(source, first, experts, counts);
                CROSSDOCK_UNROLL
                for (uint32_t i = 0; i < kExpertsAtOnce; ++i) {
                    const uint32_t expert = first + op_.lane() + i * kLanes;
                    if (expert >= experts) continue;
                    announced.first_rows[source * experts + expert] = static_cast<uint32_t>(counts.choices[i]);
                    choices += counts.choices[i];
                }
            }
            if (is_leader(ctx_)) {
                const uint64_t rows = counts.rows % kLl128Rows;
                const bool is_ll128 = counts.rows / kLl128Rows != 0;
                is_right &=
                    op_.expect(PeerNumber::kRows, source, is_ll128 ? c_.arena.ll128_tokens : c_.arena.max_tokens, rows);
                announced.rows[source] = static_cast<uint32_t>(rows);
                announced.ll128[source] = is_ll128 ? announced.rows[source] : 0;
            }
            if (experts > 0) {
                // A lane with too many choices reports them itself, so that the warp's sum fits in 32 bits.
                const bool is_possible = op_.expect(PeerNumber::kChoices, source, most_choices, choices);
                const uint32_t sum = static_cast<uint32_t>(ctx_.warp_sum(is_possible ? static_cast<int>(choices) : 0));
                is_right &= is_possible;
                if (is_leader(ctx_)) {
                    is_right &= op_.expect(PeerNumber::kChoices, source, most_choices, sum);
                    announced.choices[source] = sum;
                }
            }
            if (ctx_.warp_any(!is_right)) forget_source(ctx_, c_, announced, source);
        }
        share.sync(ctx_);
    }

    // Turns counts into first rows; an expert's total, at most its capacity, is written for the caller.
    CROSSDOCK_DEVICE void scan_experts(const Announced& announced, const WorkShare& share) const {
        const uint32_t experts = c_.offsets.experts_per_rank;
        const uint32_t capacity = c_.offsets.num_slots;
        CROSSDOCK_ROLLED
        for (uint32_t expert = share.thread(ctx_); expert < experts; expert += share.threads()) {
            uint32_t rows = 0;
            CROSSDOCK_ROLLED
            for (uint32_t source = 0; source < c_.arena.num_ranks; ++source) {
                uint32_t& first_row = announced.first_rows[source * experts + expert];
                const uint32_t count = first_row;
                first_row = rows;
                rows += count;
            }
            if (share.block != 0) continue;
            args_.counters[expert] = static_cast<int32_t>(rows < capacity ? rows : capacity);
            if (rows > capacity && c_.traps_overflow) record_overflow(ctx_, c_.scope, c_.rank, rows, capacity);
        }
    }

    // Elastic. Finds where each expert's rows begin, and tells the caller how many there are.
    CROSSDOCK_DEVICE void place_experts(const Announced& announced, const WorkShare& share) const {
        const ElasticDispatchArgs& call = args_.elastic;
        const uint32_t experts = counted_experts(share);
        CROSSDOCK_ROLLED
        for (uint32_t expert = share.thread(ctx_); expert < experts; expert += share.threads()) {
            uint32_t rows = 0;
            CROSSDOCK_ROLLED
            for (uint32_t source = 0; source < c_.arena.num_ranks; ++source) {
                uint32_t& first_row = announced.first_rows[source * experts + expert];
                const uint32_t count = first_row;
                first_row = rows;
                rows += count;
            }
            announced.expert_rows[expert] = rows;
            announced.padded_rows[expert] = static_cast<uint32_t>(align_up(rows, call.alignment));
        }
        share.sync(ctx_);
        if (share.warp(ctx_) == 0) lay_out_zones(announced, experts, tells_experts(share));
        share.sync(ctx_);
    }
    // One warp.
    CROSSDOCK_DEVICE void lay_out_zones(const Announced& announced, uint32_t experts, bool tells) const {
        const ElasticDispatchArgs& call = args_.elastic;
        uint64_t rows_before = 0;
        CROSSDOCK_ROLLED
        for (uint32_t base = 0; base < experts; base += kLanes) {
            const uint32_t expert = base + op_.lane();
            const bool is_expert = expert < experts;
            const uint32_t rows = is_expert ? announced.expert_rows[expert] : 0;
            const uint32_t padded = is_expert ? announced.padded_rows[expert] : 0;
            // By halves, whose sums fit into 32 bits.
            constexpr uint32_t kHalf = 16;
            const int halves[2] = {static_cast<int>(padded % (1u << kHalf)), static_cast<int>(padded >> kHalf)};
            const uint64_t begin = rows_before + static_cast<uint32_t>(ctx_.warp_sum_before(halves[0])) +
                                   (uint64_t{static_cast<uint32_t>(ctx_.warp_sum_before(halves[1]))} << kHalf);
            rows_before += static_cast<uint32_t>(ctx_.warp_sum(halves[0])) +
                           (uint64_t{static_cast<uint32_t>(ctx_.warp_sum(halves[1]))} << kHalf);
            if (!is_expert) continue;
            announced.zones[expert] = static_cast<uint32_t>(begin < call.rows ? begin : call.rows);
            if (!tells) continue;
            const uint64_t end = begin + (c_.expert_major ? rows : padded);
            if (call.expert_counts != nullptr) call.expert_counts[expert] = static_cast<int32_t>(rows);
            if (call.expert_ends != nullptr)
                call.expert_ends[expert] = static_cast<int32_t>(end < INT32_MAX ? end : INT32_MAX);
            if (call.statistics != nullptr) call.statistics[expert] += static_cast<int32_t>(rows);
            if (c_.expert_major && rows > 0 && end > call.rows) refuse_rows(end, call.rows);
        }
        ctx_.warp_sync();
    }
    // More rows come than an output has.
    CROSSDOCK_DEVICE void refuse_rows(uint64_t rows, uint32_t most) const {
        ctx_.note_unread_slots_allowed();  // first: other warps stop as soon as the group has failed
        record_overflow(ctx_, c_.scope, static_cast<int>(c_.rank),
                        static_cast<uint32_t>(rows < UINT32_MAX ? rows : UINT32_MAX), most);
    }

    // Writes what a later combine needs, and the number of plain rows in the buffer of the sources below each. Then the
    // counts are complete for the whole block.
    CROSSDOCK_DEVICE void publish_counts(const Announced& announced, const WorkShare& share) const {
        const uint32_t num_ranks = c_.arena.num_ranks;
        if (share.block == 0) {
            CROSSDOCK_ROLLED
            for (uint32_t source = share.thread(ctx_); source < num_ranks; source += share.threads()) {
                const uint32_t rows = announced.rows[source];
                const uint32_t choices = c_.expert_major ? announced.choices[source] : 0;
                const bool is_ll128 = announced.ll128[source] > 0 || c_.arena.fits_all_in_ll128();
                const uint32_t first_row = is_elastic(args_) ? tell_rank_end(announced, source) : 0;
                *received_from(c_, source) = {rows, choices, is_ll128 ? 1u : 0u, first_row};
                if (is_elastic(args_)) continue;
                if (!c_.expert_major && args_.counters != nullptr) args_.counters[source] = static_cast<int32_t>(rows);
            }
            share.sync(ctx_);
        }
        if (share.thread(ctx_) == 0) {
            announced.plain_before[0] = 0;
            announced.rows_before[0] = 0;
            uint32_t most = 0;
            CROSSDOCK_ROLLED
            for (uint32_t source = 0; source < num_ranks; ++source) {
                const uint32_t ll128 = announced.ll128[source];
                const uint32_t in_buffer =
                    send_.own_rows_stay() && source == c_.rank ? 0 : announced.rows[source] - ll128;
                announced.plain_before[source + 1] = announced.plain_before[source] + in_buffer;
                if (is_elastic(args_))
                    announced.rows_before[source + 1] = announced.rows_before[source] + announced.rows[source];
                most = most < ll128 ? ll128 : most;
            }
            announced.ll128[num_ranks] = most;
        }
        share.sync(ctx_);
        if (is_elastic(args_)) return fill_unused_rows(announced, share);
        if (args_.tells_places && share.block == 0 && share.thread(ctx_) == 0) tell_places(args_, announced);
        if (!c_.expert_major) clear_unused_ids(announced, share);
    }
    // Returns the number of the source's first row.
    CROSSDOCK_DEVICE uint32_t tell_rank_end(const Announced& announced, uint32_t source) const {
        uint32_t first_row = 0;
        CROSSDOCK_ROLLED
        for (uint32_t other = 0; other < source; ++other) first_row += announced.rows[other];
        const uint32_t end = first_row + announced.rows[source];
        const ElasticDispatchArgs& call = args_.elastic;
        if (call.rank_ends != nullptr) call.rank_ends[source] = static_cast<int32_t>(end);
        const uint32_t most_sources = call.sources != nullptr ? call.source_rows : end;
        const uint32_t most = c_.expert_major || most_sources < call.rows ? most_sources : call.rows;
        if (announced.rows[source] > 0 && end > most) refuse_rows(end, most);
        return first_row;
    }
    // Elastic: ids beyond the last row, and the rows between the experts'.
    CROSSDOCK_DEVICE void fill_unused_rows(const Announced& announced, const WorkShare& share) const {
        const ElasticDispatchArgs& call = args_.elastic;
        if (call.out_topk_idx != nullptr) {
            const uint64_t step = uint64_t{share.num_blocks} * share.threads();
            const uint64_t end = uint64_t{call.rows} * c_.topk;
            uint64_t i = uint64_t{announced.rows_before[c_.arena.num_ranks]} * c_.topk;
            CROSSDOCK_ROLLED
            for (i += share.block * share.threads() + share.thread(ctx_); i < end; i += step) store_id(i, -1);
        }
        CROSSDOCK_ROLLED
        for (uint32_t expert = 0; call.zero_padding && expert < c_.offsets.experts_per_rank; ++expert) {
            const uint64_t begin = uint64_t{announced.zones[expert]} + announced.expert_rows[expert];
            const uint64_t end = uint64_t{announced.zones[expert]} + announced.padded_rows[expert];
            CROSSDOCK_ROLLED
            for (uint64_t row = begin + share.first(ctx_); row < end && row < call.rows; row += share.step()) {
                zero_row(ctx_, args_.out_tokens + row * args_.row_bytes, args_.row_bytes);
                for_lanes(ctx_, call.num_scales, [&](uint32_t i) { *call.out_scales.at(row, i) = 0; });
                if (call.out_weights != nullptr && is_leader(ctx_)) call.out_weights[row] = 0.0f;
            }
        }
    }
    // Elastic. i: among the elements of out_topk_idx.
    CROSSDOCK_DEVICE void store_id(uint64_t i, int32_t id) const {
        if (args_.elastic.ids_are_64_bit) {
            static_cast<int64_t*>(args_.elastic.out_topk_idx)[i] = id;
        } else {
            static_cast<int32_t*>(args_.elastic.out_topk_idx)[i] = id;
        }
    }
    CROSSDOCK_DEVICE void clear_unused_ids(const Announced& announced, const WorkShare& share) const {
        const uint32_t threads = share.num_blocks * share.threads();
        const uint32_t thread = share.block * share.threads() + share.thread(ctx_);
        CROSSDOCK_ROLLED
        for (uint32_t source = 0; source < c_.arena.num_ranks; ++source) {
            int32_t* ids = args_.out_topk_idx + uint64_t{slot_of(c_, source, 0)} * c_.topk;
            const uint32_t used = announced.rows[source] * c_.topk;
            CROSSDOCK_ROLLED
            for (uint32_t i = used + thread; i < c_.arena.max_tokens * c_.topk; i += threads) ids[i] = -1;
        }
    }

    // Headers.

    // The output row of a received row's choice of an expert here; -1 past the expert's capacity (only repeated ids can
    // exceed it).
    CROSSDOCK_DEVICE int32_t row_of_choice(const Announced& announced, uint32_t source, uint32_t expert,
                                           uint32_t number) const {
        const uint64_t row_of_expert =
            uint64_t{announced.first_rows[source * c_.offsets.experts_per_rank + expert]} + number;
        return row_of_expert < c_.offsets.num_slots
                   ? static_cast<int32_t>(expert * c_.offsets.num_slots + row_of_expert)
                   : -1;
    }

    // Checks a row's origin and the number of a choice.
    CROSSDOCK_DEVICE bool expect_origin(uint32_t source, const RowOrigin& origin, uint32_t choice) const {
        return (origin.token_idx < c_.arena.max_tokens && origin.target_idx < c_.arena.cells_per_token &&
                choice < c_.handle.choices_of_source) ||
               refuse_origin(ctx_, args_, op_, source, origin, choice);
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

    // A lane's part of a row's header: the origin and one choice.
    struct Header {
        TaggedWord origin{};
        TaggedWord choice{};
    };
    // With choice base + lane.
    CROSSDOCK_DEVICE Header load_header(uint32_t slot, uint32_t base) const {
        const TaggedWord* words = op_.header(c_.rank, slot);
        const uint32_t k = base + op_.lane();
        return {ctx_.load_tagged(words), ctx_.load_tagged(words + 1 + (k < c_.topk ? k : 0))};
    }
    CROSSDOCK_DEVICE bool has_come(const Header& header) const {
        return ctx_.warp_all(op_.is_of(header.origin) && op_.is_of(header.choice));
    }
    CROSSDOCK_DEVICE uint64_t epoch_in(const Header& header) const {
        return word_epoch(op_.is_of(header.origin) ? header.choice.tag : header.origin.tag);
    }
    // look_also: polls further words together with the header, so that their latencies overlap.
    template <typename LookAlso>
    CROSSDOCK_DEVICE bool wait_header(const ArrivingRow& row, uint32_t base, Header& header, LookAlso look_also) const {
        return wait_as_warp(
            ctx_, c_.scope, op_, WaitStep::kRow,
            [&] {
                header = load_header(slot_of(c_, row.source, row.i), base);
                look_also();
                return has_come(header) ? -1 : static_cast<int>(row.source);
            },
            [&] { return epoch_in(header); });
    }

    // One warp. Finds the places of a row. If `writes`, also fills in what the caller and a later combine need. header:
    // with the first choices; read_more(base, header) reads others. Returns false if they do not arrive or are invalid.
    template <typename ReadMore>
    CROSSDOCK_DEVICE bool read_header(const Announced& announced, const ArrivingRow& row, Header header, bool writes,
                                      const Placement& placement, ReadMore read_more) const {
        if (is_elastic(args_)) return read_elastic_header(announced, row, header, writes, placement, read_more);
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
            const uint32_t id = static_cast<uint32_t>(header.choice.payload);
            const uint32_t extra = static_cast<uint32_t>(header.choice.payload >> 32);
            const uint32_t expert = id - c_.rank * c_.offsets.experts_per_rank;  // among those here
            const bool is_here = is_choice && expert < c_.offsets.experts_per_rank;
            const uint32_t number =
                origin.first_choice + choices + static_cast<uint32_t>(ctx_.warp_count_before(is_here));
            if (!ctx_.warp_all(expect_origin(row.source, origin, c_.expert_major && is_here ? number : 0)))
                return false;
            if (base == 0 && is_leader(ctx_)) {
                *placement.direct = origin.direct == args_.direct ? args_.direct : 0;
                if (writes) *record = {origin.token_idx, cell_of(c_, origin.token_idx, origin.target_idx)};
                if (writes && !c_.expert_major && row.source == c_.rank)
                    *own_row(c_, origin.token_idx, 0) = static_cast<int32_t>(slot);
            }
            int32_t row_idx = -1;
            if (c_.expert_major) {
                if (is_here) row_idx = row_of_choice(announced, row.source, expert, extra);
                if (is_here && writes) *choice_of(c_, row.source, number) = {row_idx, cell_of(c_, origin.token_idx, k)};
                if (is_here && writes && row.source == c_.rank) *own_row(c_, origin.token_idx, k) = row_idx;
                if (is_choice && writes) reinterpret_cast<int32_t*>(record + 1)[k] = row_idx;
                choices += static_cast<uint32_t>(ctx_.warp_count(is_here));
            } else if (is_choice && writes) {
                args_.out_topk_idx[uint64_t{slot} * c_.topk + k] = static_cast<int32_t>(!is_here           ? kDropped
                                                                                        : args_.global_ids ? id
                                                                                                           : expert);
                args_.out_weights[uint64_t{slot} * c_.topk + k] = float_of(extra);
            }
            const uint32_t at = num + static_cast<uint32_t>(ctx_.warp_count_before(row_idx >= 0));
            if (row_idx >= 0) placement.rows[at] = static_cast<uint32_t>(row_idx);
            if (row_idx >= 0 && args_.transposed_scales)
                placement.columns[at] = static_cast<uint32_t>(row_idx) - expert * c_.offsets.num_slots;
            num += static_cast<uint32_t>(ctx_.warp_count(row_idx >= 0));
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
    // Elastic: the output row of a choice of an expert here; -1 beyond the outputs.
    CROSSDOCK_DEVICE int32_t elastic_row_of(const Announced& announced, uint32_t source, uint32_t expert,
                                            uint32_t number) const {
        const uint64_t row = uint64_t{announced.zones[expert]} +
                             announced.first_rows[source * c_.offsets.experts_per_rank + expert] + number;
        return row < args_.elastic.rows ? static_cast<int32_t>(row) : -1;
    }
    template <typename ReadMore>
    CROSSDOCK_DEVICE bool read_elastic_header(const Announced& announced, const ArrivingRow& row, Header header,
                                              bool writes, const Placement& placement, ReadMore read_more) const {
        const ElasticDispatchArgs& call = args_.elastic;
        RowRecord* record = row_record(c_, row.source, row.i);
        const uint32_t number = number_of(announced, row);
        const bool has_outputs = writes && !c_.expert_major && number < call.rows;
        int32_t* source = writes && call.sources != nullptr && number < call.source_rows
                              ? call.sources + uint64_t{number} * (c_.topk + 2)
                              : nullptr;
        uint32_t num = 0;  // output rows so far
        CROSSDOCK_ROLLED
        for (uint32_t base = 0; has_choices_from(c_, base); base += kLanes) {
            const uint32_t k = base + op_.lane();
            const bool is_choice = k < c_.topk;
            if (base > 0 && !read_more(base, header)) return false;
            const RowOrigin origin = RowOrigin::of(header.origin.payload);
            const ElasticChoice choice = ElasticChoice::of(header.choice.payload);
            const uint32_t expert = choice.expert - c_.rank * c_.offsets.experts_per_rank;  // among those here
            const bool is_here = is_choice && expert < c_.offsets.experts_per_rank;
            if (!ctx_.warp_all(expect_origin(row.source, origin, 0))) return false;
            if (base == 0 && is_leader(ctx_)) {
                *placement.direct = 0;
                if (writes) *record = {origin.token_idx, cell_of(c_, origin.token_idx, origin.target_idx)};
                if (writes && !c_.expert_major && row.source == c_.rank)
                    *own_row(c_, origin.token_idx, 0) = static_cast<int32_t>(number);
                if (source != nullptr) {
                    source[0] = static_cast<int32_t>(row.source * call.origin_stride + origin.token_idx);
                    source[1] = static_cast<int32_t>(number);
                }
            }
            int32_t row_idx = -1;
            if (is_here) row_idx = c_.expert_major ? elastic_row_of(announced, row.source, expert, choice.number) : 0;
            const bool has_row = row_idx >= 0 && !choice.repeats;
            if (is_choice && writes)
                reinterpret_cast<int32_t*>(record + 1)[k] = row_idx >= 0 && !has_row ? -2 - row_idx : row_idx;
            if (is_choice && source != nullptr) source[2 + k] = c_.expert_major ? row_idx : -1;
            if (is_choice && has_outputs) {
                const uint64_t at = uint64_t{number} * c_.topk + k;
                if (call.out_topk_idx != nullptr) store_id(at, is_here ? static_cast<int32_t>(expert) : -1);
                const bool is_wanted = is_here || !call.own_weights_only;
                if (call.out_weights != nullptr) call.out_weights[at] = is_wanted ? float_of(choice.weight) : 0.0f;
            }
            if (!c_.expert_major) continue;
            if (has_row && writes && call.out_weights != nullptr) call.out_weights[row_idx] = float_of(choice.weight);
            const uint32_t at = num + static_cast<uint32_t>(ctx_.warp_count_before(has_row));
            if (has_row) placement.rows[at] = static_cast<uint32_t>(row_idx);
            num += static_cast<uint32_t>(ctx_.warp_count(has_row));
        }
        if (!c_.expert_major) {
            place_by_rank(announced, row, placement);
        } else if (is_leader(ctx_)) {
            *placement.num = num;
        }
        ctx_.warp_sync();
        return true;
    }

    // Scales.

    // Places 8 or 16 bytes of a row's scales, from their byte `first` on.
    CROSSDOCK_DEVICE void place_scale_part(const Placement& placement, uint32_t first, uint32_t bytes,
                                           const Bytes16& part) const {
        const uint32_t scales = args_.scale_bytes / 4;
        const uint32_t step = args_.transposed_scales ? c_.offsets.num_slots : 1;
        const uint32_t left = first / 4 < scales ? scales - first / 4 : 0;
        const uint32_t words = bytes / 4 < left ? bytes / 4 : left;
        // FP8's scales are floats, which callers must align (expect_elements_aligned).
        const bool are_aligned = args_.wire == LlDispatchWire::kFp8 || is_word(args_.out_scales);
        const uint32_t num_places = *placement.num;
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < num_places; ++i) {
            const uint32_t row = placement.rows[i];
            if (is_elastic(args_)) {
                CROSSDOCK_UNROLL
                for (uint32_t j = 0; j < 4; ++j) {
                    const uint32_t value = static_cast<uint32_t>((j < 2 ? part.low : part.high) >> (32 * (j % 2)));
                    if (j < words) *args_.elastic.out_scales.at(row, first / 4 + j) = value;
                }
                continue;
            }
            const uint32_t column = args_.transposed_scales ? placement.columns[i] : 0;
            const uint64_t first_word = uint64_t{row - column} * scales + column + uint64_t{step} * (first / 4);
            std::byte* target = args_.out_scales + 4 * first_word;
            CROSSDOCK_UNROLL
            for (uint32_t j = 0; j < 4; ++j) {
                const uint32_t value = static_cast<uint32_t>((j < 2 ? part.low : part.high) >> (32 * (j % 2)));
                if (j < words) store_word(target + 4 * uint64_t{step} * j, value, are_aligned);
            }
        }
    }
    static constexpr uint32_t kScalePart = 8;  // bytes that a lane places at once
    // This lane's first part of a row's scales, so that it can be loaded early.
    CROSSDOCK_DEVICE uint64_t load_first_scales(const std::byte* scales) const {
        const uint32_t first = kScalePart * op_.lane();
        return first < args_.scale_bytes ? *reinterpret_cast<const uint64_t*>(scales + first) : 0;
    }
    // One warp. Places all scales of a row. Each is read once, for any number of places. part: load_first_scales.
    CROSSDOCK_DEVICE void place_all_scales(const Placement& placement, const std::byte* scales, uint64_t part) const {
        CROSSDOCK_ROLLED
        for (uint32_t first = kScalePart * op_.lane(); first < args_.scale_bytes; first += kScalePart * kLanes) {
            const bool is_first = first < kScalePart * kLanes;
            place_scale_part(placement, first, kScalePart,
                             {is_first ? part : *reinterpret_cast<const uint64_t*>(scales + first), 0});
        }
    }
    // Places this lane's part of a row's scales in these groups of lines.
    template <uint32_t kMost>
    CROSSDOCK_DEVICE void place_scales_of_lines(const Placement& placement, const Ll128Row& row, uint32_t first_group,
                                                uint32_t num, const Ll128Group (&groups)[kMost]) const {
        if (args_.scale_bytes == 0) return;
        CROSSDOCK_ROLLED
        for (uint32_t g = 0; g < num; ++g) {
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kPiecesOfLane; ++i) {
                Bytes16 bytes = groups[0].pieces[i];
                CROSSDOCK_UNROLL
                for (uint32_t other = 1; other < kMost; ++other) {
                    if (other == g) bytes = groups[other].pieces[i];
                }
                const uint32_t offset = row.offset(first_group + g, i);
                if (!row.has_payload(first_group + g, i, row.bytes()) || offset < args_.row_bytes) continue;
                place_scale_part(placement, offset - args_.row_bytes, row.has_tag(i) ? 8 : 16, bytes);
            }
        }
    }

    // This rank's own rows, if they stayed in the block's sending stages: each warp places that of one stage.

    // Looked up while the counts are on their way.
    CROSSDOCK_DEVICE uint32_t first_choice_of_own_row(const WorkShare& share) const {
        const uint32_t stage = share.warp(ctx_);
        return stage < send_.num_staged() ? send_.choices_before(stage, c_.rank) : 0;
    }
    // first_choice: of first_choice_of_own_row.
    CROSSDOCK_DEVICE RowsRead place_own_row(const Announced& announced, const WorkShare& share,
                                            uint32_t first_choice) const {
        const uint32_t of_stage = share.warp(ctx_);
        SendTask own;
        if (of_stage >= send_.num_staged() || !send_.find_own_row(of_stage, own) ||
            own.row_idx >= announced.rows[c_.rank])
            return {};
        const Placement placement = placement_of_warp();
        const auto read = [&](uint32_t base, Header& header) {
            const uint32_t k = base + op_.lane();
            header.origin.payload = send_.header_word(own, 0, first_choice, 0);
            header.choice.payload = send_.header_word(own, 0, first_choice, 1 + (k < c_.topk ? k : 0));
            return true;
        };
        Header header;
        read(0, header);
        if (!read_header(announced, {c_.rank, own.row_idx}, header, true, placement, read)) return {1, 0};
        ctx_.mark(Step::kDispatchHeader);
        const RowStage stage = send_.stage_at(own.stage);
        if (is_leader(ctx_) && !send_.own_rows_are_placed()) {
            if (args_.wire == LlDispatchWire::kBytes) stage.wait_loaded(ctx_, 0);
            store_places(placement, stage, 0, args_.row_bytes);
            RowStage::wait_read(ctx_);
        }
        const std::byte* scales = stage.data() + args_.shared.tail;
        place_all_scales(placement, scales, load_first_scales(scales));
        if (is_leader(ctx_)) count_rows(ctx_, c_.reach, c_.rank, 1, bytes_with_scales(args_));
        ctx_.warp_sync();
        ctx_.mark(Step::kDispatchPlaced);
        return {1, 1};
    }

    // Plain rows: each warp with a stage places rows through it, in the order of sources.

    CROSSDOCK_DEVICE RowsRead receive_plain_rows(const Announced& announced, const WorkShare& share) {
        RowsRead rows;
        const uint32_t warp = share.warp(ctx_);
        const uint32_t stages = c_.warp_layout.receive_stages;
        if (warp >= stages) return rows;
        const RowStage stage = stage_of(ctx_, args_.shared, c_.warp_layout.num_stages + warp);
        const Placement placement = placement_of_warp();
        ArrivingRow row;
        CROSSDOCK_ROLLED
        for (uint32_t i = share.first(ctx_); i < announced.plain_before[c_.arena.num_ranks];
             i += stages * share.num_blocks) {
            while (announced.plain_before[row.source + 1] <= i) ++row.source;
            row.i = i - announced.plain_before[row.source];
            ++rows.expected;
            rows.read += receive_plain(announced, row, placement, stage) ? 1 : 0;
        }
        return rows;
    }

    CROSSDOCK_DEVICE bool receive_plain(const Announced& announced, const ArrivingRow& row, const Placement& placement,
                                        const RowStage& stage) {
        const uint32_t slot = slot_of(c_, row.source, row.i);
        const uint64_t* flag = op_.flag(c_.rank, slot);
        uint64_t seen = 0;  // of the flag, with the header
        const auto read = [&](uint32_t base, Header& header) {
            return wait_header(row, base, header, [&] { seen = ctx_.load_acquire_system(flag); });
        };
        Header header;
        if (!read(0, header) || !read_header(announced, row, header, true, placement, read)) return false;
        ctx_.mark(Step::kDispatchHeader);
        const bool arrived = is_leader(ctx_) && (op_.is_gin_peer(row.source) || word_epoch(seen) == op_.epoch ||
                                                 op_.wait_word(WaitStep::kRow, row.source, flag, seen));
        if (ctx_.warp_broadcast(arrived ? 1u : 0u) == 0) return false;
        ctx_.mark(Step::kDispatchArrived);
        ctx_.fence_async_copies();  // the flag was read by an ordinary load, the row is read by an asynchronous copy
        const std::byte* source = op_.row(c_.rank, slot);
        const uint32_t direct = *placement.direct;
        const std::byte* scales = source + args_.row_bytes;
        const uint64_t first_scales = load_first_scales(scales);
        if (is_leader(ctx_) && (direct & kDirectTokens) == 0) place_plain(placement, stage, source);
        if ((direct & kDirectScales) == 0) place_all_scales(placement, scales, first_scales);
        if (is_leader(ctx_)) op_.note_read(slot);
        ctx_.warp_sync();
        ctx_.mark(Step::kDispatchPlaced);
        return true;
    }
    // One thread.
    CROSSDOCK_DEVICE void place_plain(const Placement& placement, const RowStage& stage, const std::byte* source) {
        CROSSDOCK_ROLLED
        for (uint32_t first = 0; first < args_.row_bytes; first += c_.warp_layout.chunk_bytes) {
            const uint32_t left = args_.row_bytes - first;
            const uint32_t chunk = left < c_.warp_layout.chunk_bytes ? left : c_.warp_layout.chunk_bytes;
            stage.load(ctx_, source + first, chunk);
            stage.wait_loaded(ctx_, round_++);
            store_places(placement, stage, first, chunk);
            stage.wait_reusable(ctx_);
        }
    }
    // One thread. Bytes [first, first + chunk) of a row are in the stage.
    CROSSDOCK_DEVICE void store_places(const Placement& placement, const RowStage& stage, uint32_t first,
                                       uint32_t chunk) const {
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < *placement.num; ++i)
            stage.store(ctx_, args_.out_tokens + uint64_t{placement.rows[i]} * args_.row_bytes + first, 0, chunk);
        RowStage::end_group(ctx_);
    }

    // LL128 rows, of the sources in turn. Consecutive runs are in different blocks, so that all blocks finish together
    // even with few rows.

    CROSSDOCK_DEVICE RowsRead receive_ll128_rows(const Announced& announced, const WorkShare& share) const {
        RowsRead rows;
        const Placement placement = placement_of_warp();
        const Ll128Row shape(ctx_, bytes_with_scales(args_));
        const uint32_t num_rows = announced.ll128[c_.arena.num_ranks] * c_.arena.num_ranks;
        const Ll128Parts parts = Ll128Parts::of(shape, num_rows, share.step());
        CROSSDOCK_ROLLED
        for (uint32_t i = share.first(ctx_); i < num_rows * parts.num; i += share.step()) {
            const uint32_t number = i / parts.num;
            const uint32_t slot = number / c_.arena.num_ranks;
            const ArrivingRow row{number - slot * c_.arena.num_ranks, slot};
            if (slot >= announced.ll128[row.source]) continue;
            const Ll128Run run = parts.run(i % parts.num);
            const bool came = receive_ll128(announced, row, shape, run, placement);
            rows.expected += run.begin == 0 ? 1 : 0;
            rows.read += run.begin == 0 && came ? 1 : 0;
        }
        return rows;
    }

    // One warp places its run of a row.
    CROSSDOCK_DEVICE bool receive_ll128(const Announced& announced, const ArrivingRow& row, const Ll128Row& shape,
                                        const Ll128Run& run, const Placement& placement) const {
        constexpr uint32_t kGroupsAtOnce = 4;
        const uint32_t slot = slot_of(c_, row.source, row.i);
        const std::byte* lines = op_.row(c_.rank, slot);
        const bool is_first = run.begin == 0;
        CROSSDOCK_ROLLED
        for (uint32_t first = run.begin; first < run.end; first += kGroupsAtOnce) {
            const uint32_t num = run.end - first < kGroupsAtOnce ? run.end - first : kGroupsAtOnce;
            Ll128Wait<kGroupsAtOnce> wait;
            wait.missing = (1u << num) - 1;
            const bool needs_header = first == run.begin && (c_.expert_major || is_first);
            Header header;
            const bool came = wait_as_warp(
                ctx_, c_.scope, op_, WaitStep::kRow,
                [&] {
                    if (needs_header) header = load_header(slot, 0);
                    wait.look(
                        ctx_, shape, op_.epoch,
                        [&](uint32_t i, Ll128Group& group) {
                            group.load(ctx_, shape, first + i, lines + shape.offset_in_lines(first + i));
                        },
                        [&](uint32_t i) { return first + i; });
                    const bool has_all = wait.missing == 0 && (!needs_header || has_come(header));
                    return has_all ? -1 : static_cast<int>(row.source);
                },
                [&] {
                    return wait.missing != 0 ? epoch_in_ll128(ctx_, lines, first + wait.first_missing())
                                             : epoch_in(header);
                });
            const auto read_more = [&](uint32_t base, Header& more) { return wait_header(row, base, more, [] {}); };
            if (!came || (needs_header && !read_header(announced, row, header, is_first, placement, read_more)))
                return false;
            if (first == run.begin && !needs_header) {
                place_by_rank(announced, row, placement);
                ctx_.warp_sync();
            }
            ctx_.mark(Step::kDispatchArrived);
            const Ll128Copies<kGroupsAtOnce> copies(shape, first, num, args_.row_bytes);
            const auto write = [&]<uint32_t kNum>() {
                const uint32_t num_places = *placement.num;
                CROSSDOCK_ROLLED
                for (uint32_t i = 0; i < num_places; ++i) {
                    std::byte* copy = args_.out_tokens + uint64_t{placement.rows[i]} * args_.row_bytes;
                    copies.template write<kNum>(wait.groups, copy);
                }
            };
            num == 1 ? write.template operator()<1>() : write.template operator()<kGroupsAtOnce>();
            place_scales_of_lines(placement, shape, first, num, wait.groups);
        }
        if (is_leader(ctx_) && is_first) op_.note_read(slot);
        ctx_.warp_sync();
        ctx_.mark(Step::kDispatchPlaced);
        return true;
    }

    const Op& op_;
    const Send& send_;
    const Ctx& ctx_;
    decltype(Op::args) args_;
    decltype(Op::c) c_;
    uint32_t round_ = 0;  // loads of this warp's stage
};

// The kernel: both halves or one of them. Contract: nccl_ep.h, ncclEpDispatch; protocol: docs/protocol.md.
CROSSDOCK_DEVICE void ll_dispatch(const Ctx& ctx, const auto& args) {
    LlOperation op(ctx, args);
    DispatchSend send(op);
    DispatchReceive receive(op, send);
    const uint32_t direct = args.common.expert_major ? 0 : args.direct;  // a constant in kernels that know their layout
    run_operation(op, direct, send, receive);
}

}  // namespace
}  // namespace crossdock
