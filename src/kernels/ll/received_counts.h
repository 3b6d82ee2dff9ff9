// SPDX-License-Identifier: Apache-2.0
// Dispatch, receive half: what the sources have announced. Every block gathers their counts and finds where rows go;
// some blocks tell the caller.
#pragma once

#include "kernels/counters.h"
#include "kernels/ll/dispatch_send.h"
#include "kernels/ll/elastic_dispatch.h"

namespace crossdock {
namespace {

// A lane's part of a source's counts: the rows, and the choices of some experts.
struct CountsOfLane {
    uint64_t rows = 0;
    uint64_t choices[kExpertsAtOnce] = {};
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

// Rows of each zone whose blocks are published (kernels/ll/overlap.h).
CROSSDOCK_DEVICE const uint32_t* rows_of_zones(const auto& c, const Announced& announced) {
    return c.expert_major ? announced.expert_rows : announced.rows;
}

template <typename Op>
class ReceivedCounts {
  public:
    CROSSDOCK_DEVICE ReceivedCounts(const Op& op, const DispatchSend<Op>& send)
        : op_(op), send_(send), ctx_(op.ctx), args_(op.args), c_(op.c) {}

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
                zones,
                received + 4 * stride,
                zones + experts,
                zones + 2 * experts};
    }
    // Waits for every source's counts and checks them. Masked sources, and those with wrong counts, send nothing.
    CROSSDOCK_DEVICE void gather(const Announced& announced, const WorkShare& share) const {
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
                const uint32_t sum = ctx_.warp_sum(is_possible ? static_cast<uint32_t>(choices) : 0);
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

    // Finds where rows of experts begin.
    CROSSDOCK_DEVICE void place_rows(const Announced& announced, const WorkShare& share) const {
        if (is_elastic(args_)) {
            place_experts(announced, share);
        } else if (c_.expert_major) {
            scan_experts(announced, share);
        }
    }
    // Writes what a later combine needs, and the number of plain rows in the buffer of the sources below each. Then the
    // counts are complete for the whole block.
    CROSSDOCK_DEVICE void publish(const Announced& announced, const WorkShare& share) const {
        const uint32_t num_ranks = c_.arena.num_ranks;
        if (share.block == 0) {
            CROSSDOCK_ROLLED
            for (uint32_t source = share.thread(ctx_); source < num_ranks; source += share.threads()) {
                const uint32_t rows = announced.rows[source];
                const uint32_t choices = c_.expert_major ? announced.choices[source] : 0;
                const bool is_ll128 = announced.ll128[source] > 0 || c_.arena.fits_all_in_ll128();
                const uint32_t first_row = is_elastic(args_) ? tell_rank_end(op_, announced, source) : 0;
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
                    send_.planner().own_rows_stay() && source == c_.rank ? 0 : announced.rows[source] - ll128;
                announced.plain_before[source + 1] = announced.plain_before[source] + in_buffer;
                if (is_elastic(args_))
                    announced.rows_before[source + 1] = announced.rows_before[source] + announced.rows[source];
                most = most < ll128 ? ll128 : most;
            }
            announced.ll128[num_ranks] = most;
        }
        share.sync(ctx_);
        if (is_elastic(args_)) return fill_unused_rows(op_, announced, share);
        if (args_.tells_places && share.block == 0 && share.thread(ctx_) == 0) tell_places(args_, announced);
        if (!c_.expert_major) clear_unused_ids(announced, share);
    }

  private:
    // Elastic: the block that tells the caller how many rows experts have. Rank-major, where no other block reads these
    // counts, it is the one with the least other work.
    CROSSDOCK_DEVICE bool tells_experts(const WorkShare& share) const {
        return is_elastic(args_) && share.block == (c_.expert_major ? 0 : share.num_blocks - 1);
    }
    // The number of experts whose choices are read.
    CROSSDOCK_DEVICE uint32_t counted_experts(const WorkShare& share) const {
        return c_.expert_major || tells_experts(share) ? c_.offsets.experts_per_rank : 0;
    }

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

    // Turns sources' counts of an expert into their first rows. Returns how many rows there are.
    CROSSDOCK_DEVICE uint32_t number_rows_of(const Announced& announced, uint32_t expert, uint32_t experts) const {
        uint32_t rows = 0;
        CROSSDOCK_ROLLED
        for (uint32_t source = 0; source < c_.arena.num_ranks; ++source) {
            uint32_t& first_row = announced.first_rows[source * experts + expert];
            const uint32_t count = first_row;
            first_row = rows;
            rows += count;
        }
        return rows;
    }
    // An expert's total, at most its capacity, is written for the caller.
    CROSSDOCK_DEVICE void scan_experts(const Announced& announced, const WorkShare& share) const {
        const uint32_t experts = c_.offsets.experts_per_rank;
        const uint32_t capacity = c_.offsets.num_slots;
        CROSSDOCK_ROLLED
        for (uint32_t expert = share.thread(ctx_); expert < experts; expert += share.threads()) {
            const uint32_t rows = number_rows_of(announced, expert, experts);
            const uint32_t placed = rows < capacity ? rows : capacity;
            if (publishes_rows(args_)) announced.expert_rows[expert] = placed;
            if (share.block != 0) continue;
            args_.counters[expert] = static_cast<int32_t>(placed);
            if (rows > capacity && c_.traps_overflow) record_overflow(ctx_, c_.scope, c_.rank, rows, capacity);
        }
    }

    // Elastic. Finds where each expert's rows begin, and tells the caller how many there are.
    CROSSDOCK_DEVICE void place_experts(const Announced& announced, const WorkShare& share) const {
        const uint32_t experts = counted_experts(share);
        CROSSDOCK_ROLLED
        for (uint32_t expert = share.thread(ctx_); expert < experts; expert += share.threads()) {
            const uint32_t rows = number_rows_of(announced, expert, experts);
            announced.expert_rows[expert] = rows;
            announced.padded_rows[expert] = static_cast<uint32_t>(align_up(rows, args_.elastic.alignment));
        }
        share.sync(ctx_);
        if (share.warp(ctx_) == 0) lay_out_zones(op_, announced, experts, tells_experts(share));
        share.sync(ctx_);
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

    const Op& op_;
    const DispatchSend<Op>& send_;
    const Ctx& ctx_;
    decltype(Op::args) args_;
    decltype(Op::c) c_;
};

}  // namespace
}  // namespace crossdock
