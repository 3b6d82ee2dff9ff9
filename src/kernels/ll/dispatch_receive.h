// SPDX-License-Identifier: Apache-2.0
// Dispatch, receive half: every arrived row is placed where its expert (expert-major) or its source (rank-major) wants
// it, in the order (source rank, token, k), while others are still under way.
#pragma once

#include "kernels/counters.h"
#include "kernels/ll/dispatch_send.h"

namespace crossdock {
inline namespace CROSSDOCK_VARIANT {

// What the sources have announced, in shared memory.
struct Announced {
    int* rows;          // [ranks]
    int* choices;       // [ranks] of experts here; expert-major
    int* plain_before;  // [ranks + 1]: rows in plain form of the sources below
    int* lines;         // [ranks]: rows in line form; then the largest number of them
    int* first_rows;    // [ranks][local experts]: where a source's rows of an expert begin; expert-major
};

CROSSDOCK_DEVICE Announced announced_in(const Ctx& ctx, const auto& args) {
    const auto& c = args.common;
    const LlDispatchShared& shared = args.shared;
    const uint32_t stride = c.arena.num_ranks + 1;
    int* received = reinterpret_cast<int*>(ctx.shared_memory() + shared.received);
    return {received, received + stride, received + 2 * stride, received + 3 * stride,
            reinterpret_cast<int*>(ctx.shared_memory() + shared.first_rows)};
}

// Of a source elsewhere everything is here at once. Without rows it puts no more than the first of its counts.
CROSSDOCK_DEVICE bool has_far_rows(const Ctx& ctx, const auto& c, const Operation& operation, int source) {
    if (!wait_far_as_warp(ctx, c, operation, WaitStep::kCounts, Signal::kData, source)) return false;
    uint64_t rows = 0;
    wait_count(ctx, c, operation, source, count_words(c, operation, c.rank, source), rows);
    return rows % kLineRows != 0;
}

// A source counts as silent; where the group has failed, nothing is received at all.
CROSSDOCK_DEVICE_RARE void forget_source(const Ctx& ctx, const auto& c, const Announced& announced, int source) {
    if (has_failed(ctx, c.scope)) ll_block_head(ctx)->is_refused = 1;
    ctx.warp_sync();
    const int experts = c.expert_major ? static_cast<int>(c.offsets.experts_per_rank) : 0;
    CROSSDOCK_ROLLED
    for (int i = ctx.lane(); i < experts; i += kLanes) announced.first_rows[source * experts + i] = 0;
    announced.rows[source] = announced.lines[source] = announced.choices[source] = 0;
    ctx.warp_sync();
}

// What a lane has of a source's counts: the rows, and some of its experts' choices; 0: none.
struct CountsOfLane {
    static constexpr int kExpertsAtOnce = kLanes > 1 ? 8 : 1;
    uint64_t rows = 0;
    uint64_t choices[kExpertsAtOnce] = {};
};

// Those of experts first + lane + i * kLanes: all are looked at together, with the source's entry. The words are all
// there is to them: nothing is ordered behind them.
CROSSDOCK_DEVICE bool wait_counts(const Ctx& ctx, const auto& c, const Operation& operation, int source, int first,
                                  CountsOfLane& counts) {
    if (!is_active(ctx, c.scope, source)) return false;
    const uint64_t* words = count_words(c, operation, c.rank, source);
    const int experts = c.expert_major ? static_cast<int>(c.offsets.experts_per_rank) : 0;
    TaggedWord entry{};
    const auto expert_at = [&](int i) { return first + ctx.lane() + i * kLanes; };
    const bool came = wait_until(
        ctx, c.scope, operation, WaitStep::kCounts, source, operation.epoch,
        [&] {
            entry = load_entry_of(ctx, c, operation, source);
            counts.rows = ctx.load_relaxed_system(words);
            uint64_t other = word_epoch(counts.rows);
            CROSSDOCK_UNROLL
            for (int i = 0; i < CountsOfLane::kExpertsAtOnce; ++i) {
                if (expert_at(i) < experts) counts.choices[i] = ctx.load_relaxed_system(words + 1 + expert_at(i));
            }
            CROSSDOCK_UNROLL
            for (int i = 0; i < CountsOfLane::kExpertsAtOnce; ++i) {
                if (expert_at(i) < experts && word_epoch(counts.choices[i]) != operation.epoch)
                    other = word_epoch(counts.choices[i]);
            }
            return other;
        },
        [&](uint64_t epoch) { return epoch == operation.epoch && has_entered_alike(entry, c.scope, operation); });
    counts.rows = came ? word_payload(counts.rows) : 0;
    CROSSDOCK_UNROLL
    for (int i = 0; i < CountsOfLane::kExpertsAtOnce; ++i) {
        counts.choices[i] = came && expert_at(i) < experts ? word_payload(counts.choices[i]) : 0;
    }
    return came;
}

// Waits for every source's counts, and judges them. Sources that are masked, or whose counts are wrong, are silent.
CROSSDOCK_DEVICE void gather_counts(const Ctx& ctx, const auto& c, const Operation& operation,
                                    const Announced& announced, const WorkShare& share) {
    const int num_ranks = static_cast<int>(c.arena.num_ranks);
    const int experts = c.expert_major ? static_cast<int>(c.offsets.experts_per_rank) : 0;
    CROSSDOCK_ROLLED
    for (int source = share.warp(ctx); source < num_ranks; source += share.warps) {
        const bool is_silent = is_remote(c.reach, source) && !has_far_rows(ctx, c, operation, source);
        const uint32_t most_choices = c.handle.choices_of_source;
        const auto expect = [&](PeerNumber number, uint64_t most, uint64_t seen) {
            return expect_number(ctx, c, operation, number, source, most, seen);
        };
        bool is_right = true;
        uint64_t choices = 0;
        CountsOfLane counts;
        CROSSDOCK_ROLLED
        for (int first = 0; first == 0 || first < experts; first += CountsOfLane::kExpertsAtOnce * kLanes) {
            is_right &= !is_silent && wait_counts(ctx, c, operation, source, first, counts);
            CROSSDOCK_UNROLL
            for (int i = 0; i < CountsOfLane::kExpertsAtOnce; ++i) {
                const int expert = first + ctx.lane() + i * kLanes;
                if (expert >= experts) continue;
                announced.first_rows[source * experts + expert] = static_cast<int>(counts.choices[i]);
                choices += counts.choices[i];
            }
        }
        if (is_leader(ctx)) {
            const uint64_t rows = counts.rows % kLineRows;
            const bool in_lines = counts.rows / kLineRows != 0;
            is_right &= expect(PeerNumber::kRows, in_lines ? c.arena.line_tokens : c.arena.max_tokens, rows);
            announced.rows[source] = static_cast<int>(rows);
            announced.lines[source] = in_lines ? announced.rows[source] : 0;
        }
        if (c.expert_major) {
            // A lane with too many says so itself, so that the warp's sum stays within 32 bits.
            const bool is_possible = expect(PeerNumber::kChoices, most_choices, choices);
            const int sum = ctx.warp_sum(is_possible ? static_cast<int>(choices) : 0);
            is_right &= is_possible;
            if (is_leader(ctx)) {
                is_right &= expect(PeerNumber::kChoices, most_choices, static_cast<uint32_t>(sum));
                announced.choices[source] = sum;
            }
        }
        if (ctx.warp_any(!is_right)) forget_source(ctx, c, announced, source);
    }
    share.sync(ctx);
}

// Turns counts into first rows; the total of an expert, at most its capacity, goes to the caller.
CROSSDOCK_DEVICE void scan_experts(const Ctx& ctx, const auto& args, const Announced& announced,
                                   const WorkShare& share) {
    const auto& c = args.common;
    const int num_ranks = static_cast<int>(c.arena.num_ranks);
    const int experts = static_cast<int>(c.offsets.experts_per_rank);
    const int capacity = static_cast<int>(c.offsets.num_slots);
    CROSSDOCK_ROLLED
    for (int expert = share.thread(ctx); expert < experts; expert += share.threads()) {
        int rows = 0;
        CROSSDOCK_ROLLED
        for (int source = 0; source < num_ranks; ++source) {
            const int count = announced.first_rows[source * experts + expert];
            announced.first_rows[source * experts + expert] = rows;
            rows += count;
        }
        if (share.block != 0) continue;
        args.counters[expert] = rows < capacity ? rows : capacity;
        if (rows > capacity && c.traps_overflow)
            record_overflow(ctx, c.scope, c.rank, static_cast<uint32_t>(rows), static_cast<uint32_t>(capacity));
    }
}

// Where experts' rows begin among all rows, and how many came in all. One thread, behind a barrier of those that wrote
// the counters.
CROSSDOCK_DEVICE_RARE void tell_places(const auto& args, const Announced& announced) {
    const auto& c = args.common;
    const uint32_t num = c.expert_major ? c.offsets.experts_per_rank : c.arena.num_ranks;
    uint32_t total = 0;
    CROSSDOCK_ROLLED
    for (uint32_t i = 0; i < num; ++i) {
        total += static_cast<uint32_t>(c.expert_major ? args.counters[i] : announced.rows[i]);
        if (c.expert_major) write_counter(args.offsets, args.offsets_are_64_bit, i, i * c.offsets.num_slots);
    }
    write_counter(args.total, args.total_is_64_bit, 0, total);
}

// What a later combine must know, and how many rows of either form the sources below have. Then the counts are complete
// for the whole block.
CROSSDOCK_DEVICE void publish_counts(const Ctx& ctx, const auto& args, const Announced& announced,
                                     const WorkShare& share) {
    const auto& c = args.common;
    const int num_ranks = static_cast<int>(c.arena.num_ranks);
    if (share.block == 0) {
        CROSSDOCK_ROLLED
        for (int source = share.thread(ctx); source < num_ranks; source += share.threads()) {
            const uint32_t rows = static_cast<uint32_t>(announced.rows[source]);
            const uint32_t choices = c.expert_major ? static_cast<uint32_t>(announced.choices[source]) : 0;
            const bool in_lines = announced.lines[source] > 0 || c.arena.fits_all_in_lines();
            *received_from(c, source) = {rows, choices, in_lines ? 1u : 0u, 0};
            if (!c.expert_major && args.counters != nullptr) args.counters[source] = announced.rows[source];
        }
        share.sync(ctx);
    }
    if (share.thread(ctx) == 0) {
        announced.plain_before[0] = 0;
        int most_lines = 0;
        CROSSDOCK_ROLLED
        for (int source = 0; source < num_ranks; ++source) {
            const int rows = announced.rows[source];
            announced.plain_before[source + 1] = announced.plain_before[source] + rows - announced.lines[source];
            most_lines = most_lines < announced.lines[source] ? announced.lines[source] : most_lines;
        }
        announced.lines[num_ranks] = most_lines;
    }
    share.sync(ctx);
    if (args.tells_places && share.block == 0 && share.thread(ctx) == 0) tell_places(args, announced);
    if (c.expert_major) return;
    const uint32_t threads = static_cast<uint32_t>(share.num_blocks * share.threads());
    const uint32_t thread = static_cast<uint32_t>(share.block * share.threads() + share.thread(ctx));
    CROSSDOCK_ROLLED
    for (int source = 0; source < num_ranks; ++source) {
        int32_t* ids = args.out_topk_idx + uint64_t{slot_of(c, source, 0)} * c.topk;
        const uint32_t used = static_cast<uint32_t>(announced.rows[source]) * c.topk;
        CROSSDOCK_ROLLED
        for (uint32_t i = used + thread; i < c.arena.max_tokens * c.topk; i += threads) ids[i] = -1;
    }
}

// Where a warp's current row goes, in shared memory.
struct Placement {
    int32_t* rows;  // [num] indices among all out rows
    int32_t* num;
    uint32_t* direct;
};

CROSSDOCK_DEVICE Placement placement_of_warp(const Ctx& ctx, const auto& args) {
    const auto& c = args.common;
    int32_t* words = reinterpret_cast<int32_t*>(ctx.shared_memory() + args.shared.placements) +
                     uint64_t{c.topk + 2} * static_cast<uint32_t>(ctx.warp_idx());
    return {words, words + c.topk, reinterpret_cast<uint32_t*>(words + c.topk + 1)};
}

// Of an expert here, its number among them; larger ones are elsewhere.
CROSSDOCK_DEVICE uint32_t local_expert(const auto& c, int32_t id) {
    return static_cast<uint32_t>(id) - static_cast<uint32_t>(c.rank) * c.offsets.experts_per_rank;
}

// One choice of a received row, for an expert here: its out row, or -1 past the expert's capacity (only duplicates can
// fill it).
CROSSDOCK_DEVICE int32_t row_of_choice(const auto& c, const Announced& announced, const ArrivingRow& row,
                                       uint32_t expert, uint32_t place) {
    const uint32_t experts = c.offsets.experts_per_rank;
    const uint32_t first =
        static_cast<uint32_t>(announced.first_rows[static_cast<uint32_t>(row.source) * experts + expert]);
    const uint64_t row_of_expert = uint64_t{first} + place;
    return row_of_expert < c.offsets.num_slots ? static_cast<int32_t>(expert * c.offsets.num_slots + row_of_expert)
                                               : -1;
}

// Which of a row's numbers is out of range. False, always.
CROSSDOCK_DEVICE_RARE bool refuse_label(const Ctx& ctx, const auto& c, const Operation& operation, int source,
                                        const RowLabel& label, uint32_t choice) {
    const auto expect = [&](PeerNumber number, uint64_t most, uint64_t seen) {
        return expect_number(ctx, c, operation, number, source, most, seen);
    };
    return expect(PeerNumber::kToken, c.arena.max_tokens - 1, label.token_idx) &&
           expect(PeerNumber::kPlace, c.arena.cells_per_token - 1, label.place) &&
           expect(PeerNumber::kChoices, c.handle.choices_of_source, uint64_t{choice} + 1);
}

// A row's label and the number of a choice are what this source may send.
CROSSDOCK_DEVICE bool expect_label(const Ctx& ctx, const auto& c, const Operation& operation, int source,
                                   const RowLabel& label, uint32_t choice) {
    return (label.token_idx < c.arena.max_tokens && label.place < c.arena.cells_per_token &&
            choice < c.handle.choices_of_source) ||
           refuse_label(ctx, c, operation, source, label, choice);
}

// Waits for a row's header and finds out where the row goes; look_also: at what else is awaited, since a look takes as
// long as the memory is far. Whoever writes also fills in what the caller and a later combine want to know of it. One
// warp; false: it will not come.
template <typename LookAlso>
CROSSDOCK_DEVICE bool read_header(const Ctx& ctx, const auto& args, const Operation& operation,
                                  const Announced& announced, const ArrivingRow& row, bool writes, LookAlso look_also,
                                  const Placement& placement) {
    const auto& c = args.common;
    const uint32_t slot = slot_of(c, row.source, row.slot);
    const TaggedWord* words = header_words(c, operation, c.rank, slot);
    RowRecord* record = row_record(c, row.source, row.slot);
    int num = 0;      // out rows so far
    int choices = 0;  // for experts here so far
    CROSSDOCK_ROLLED
    for (uint32_t base = 0; has_choices_from(c, base); base += kLanes) {
        const uint32_t k = base + static_cast<uint32_t>(ctx.lane());
        const bool is_choice = k < c.topk;
        TaggedWord first{};
        TaggedWord choice{};
        const bool came = wait_as_warp(
            ctx, c.scope, operation, WaitStep::kRow,
            [&] {
                first = ctx.load_tagged(words);
                choice = ctx.load_tagged(words + 1 + (is_choice ? k : 0));
                look_also();
                return ctx.warp_all(is_of(first, operation) && is_of(choice, operation)) ? -1 : row.source;
            },
            [&] { return word_epoch(is_of(first, operation) ? choice.tag : first.tag); });
        if (!came) return false;
        const RowLabel label = RowLabel::of(first.payload);
        const int32_t id = static_cast<int32_t>(static_cast<uint32_t>(choice.payload));
        const uint32_t expert = local_expert(c, id);
        const bool is_here = is_choice && expert < c.offsets.experts_per_rank;
        const uint32_t number = label.first_choice + static_cast<uint32_t>(choices + ctx.warp_count_before(is_here));
        if (!ctx.warp_all(expect_label(ctx, c, operation, row.source, label, c.expert_major && is_here ? number : 0)))
            return false;
        if (base == 0 && is_leader(ctx)) {
            *placement.direct = label.direct == args.direct ? args.direct : 0;
            if (writes) *record = {label.token_idx, cell_index(c, label.token_idx, label.place)};
        }
        int32_t row_idx = -1;
        if (c.expert_major) {
            if (is_here)
                row_idx = row_of_choice(c, announced, row, expert, static_cast<uint32_t>(choice.payload >> 32));
            if (is_here && writes) *choice_of(c, row.source, number) = {row_idx, cell_index(c, label.token_idx, k)};
            if (is_choice && writes) reinterpret_cast<int32_t*>(record + 1)[k] = row_idx;
            choices += ctx.warp_count(is_here);
        } else if (is_choice && writes) {
            const int32_t first_expert = c.rank * static_cast<int32_t>(c.offsets.experts_per_rank);
            args.out_topk_idx[uint64_t{slot} * c.topk + k] = !is_here ? -1 : args.global_ids ? id : id - first_expert;
            args.out_weights[uint64_t{slot} * c.topk + k] = float_of(static_cast<uint32_t>(choice.payload >> 32));
        }
        const int at = num + ctx.warp_count_before(row_idx >= 0);
        if (row_idx >= 0) placement.rows[at] = row_idx;
        num += ctx.warp_count(row_idx >= 0);
    }
    if (is_leader(ctx)) {
        if (!c.expert_major) placement.rows[0] = static_cast<int32_t>(slot);
        *placement.num = c.expert_major ? num : 1;
    }
    ctx.warp_sync();
    return true;
}

// 8 or 16 bytes of a row's scales, from byte `first` of them on.
CROSSDOCK_DEVICE void place_scale_part(const auto& args, const Placement& placement, uint32_t first, uint32_t bytes,
                                       const Bytes16& part) {
    const uint64_t capacity = args.common.offsets.num_slots;
    const uint32_t scales = args.scale_bytes / 4;
    CROSSDOCK_ROLLED
    for (int i = 0; i < *placement.num; ++i) {
        const uint64_t row = static_cast<uint64_t>(placement.rows[i]);
        CROSSDOCK_ROLLED
        for (uint32_t j = 0; j < bytes / 4 && first / 4 + j < scales; ++j) {
            const uint32_t value = static_cast<uint32_t>((j < 2 ? part.low : part.high) >> (32 * (j % 2)));
            const uint64_t scale = first / 4 + j;
            const uint64_t word = args.transposed_scales ? (row / capacity * scales + scale) * capacity + row % capacity
                                                         : row * scales + scale;
            store_word(args.out_scales + 4 * word, value);
        }
    }
}

// All of them, by a warp: each is read once, however many places it has.
CROSSDOCK_DEVICE void place_all_scales(const Ctx& ctx, const auto& args, const Placement& placement,
                                       const std::byte* scales) {
    constexpr uint32_t kPart = 8;
    CROSSDOCK_ROLLED
    for (uint32_t first = kPart * static_cast<uint32_t>(ctx.lane()); first < args.scale_bytes;
         first += kPart * kLanes) {
        place_scale_part(args, placement, first, kPart, {*reinterpret_cast<const uint64_t*>(scales + first), 0});
    }
}

// One warp places a row in plain form, through its stage.
CROSSDOCK_DEVICE bool receive_plain(const Ctx& ctx, const auto& args, const Operation& operation,
                                    const Announced& announced, const ArrivingRow& row, const Placement& placement,
                                    const RowStage& stage, uint32_t& round) {
    const auto& c = args.common;
    const uint32_t slot = slot_of(c, row.source, row.slot);
    const uint64_t* flag = row_flag(c, operation, c.rank, slot);
    uint64_t seen = 0;  // of the flag, with the header
    const auto look = [&] { seen = ctx.load_acquire_system(flag); };
    if (!read_header(ctx, args, operation, announced, row, true, look, placement)) return false;
    ctx.mark(Step::kDispatchHeader);
    const bool arrived = is_leader(ctx) && (is_remote(c.reach, row.source) || word_epoch(seen) == operation.epoch ||
                                            wait_word(ctx, c, operation, WaitStep::kRow, row.source, flag, seen));
    if (ctx.warp_broadcast(arrived ? 1u : 0u) == 0) return false;
    ctx.mark(Step::kDispatchArrived);
    ctx.fence_async_copies();  // the flag was read by an ordinary load, the row is read by an asynchronous copy
    const std::byte* source = row_at(c, operation, c.rank, slot);
    const uint32_t direct = *placement.direct;
    if (is_leader(ctx) && (direct & kDirectTokens) == 0) {
        CROSSDOCK_ROLLED
        for (uint32_t first = 0; first < args.row_bytes; first += c.crew.chunk_bytes) {
            const uint32_t left = args.row_bytes - first;
            const uint32_t chunk = left < c.crew.chunk_bytes ? left : c.crew.chunk_bytes;
            stage.load(ctx, source + first, chunk);
            stage.wait_loaded(ctx, round++);
            CROSSDOCK_ROLLED
            for (int i = 0; i < *placement.num; ++i) {
                const uint64_t target = static_cast<uint64_t>(placement.rows[i]);
                stage.store(ctx, args.out_tokens + target * args.row_bytes + first, 0, chunk);
            }
            stage.end_group(ctx);
            stage.wait_reusable(ctx);
        }
    }
    if ((direct & kDirectScales) == 0) place_all_scales(ctx, args, placement, source + args.row_bytes);
    if (is_leader(ctx)) ctx.note_slot_read(c.rank, c.peers.at(c.rank, 0), operation.buffer, slot, operation.epoch);
    ctx.warp_sync();
    ctx.mark(Step::kDispatchPlaced);
    return true;
}

// What this lane has of a row's scales among these groups of lines.
template <uint32_t kMost>
CROSSDOCK_DEVICE void place_scales_of_lines(const Ctx& ctx, const auto& args, const Placement& placement,
                                            const LineRow& row, uint32_t first_group, uint32_t num,
                                            const LineGroup (&groups)[kMost]) {
    if (args.scale_bytes == 0) return;
    CROSSDOCK_ROLLED
    for (uint32_t g = 0; g < num; ++g) {
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kPiecesOfLane; ++i) {
            Bytes16 bytes = groups[0].pieces[i];
            CROSSDOCK_UNROLL
            for (uint32_t other = 1; other < kMost; ++other) {
                if (other == g) bytes = groups[other].pieces[i];
            }
            const LinePiece piece = row.piece(ctx, first_group + g, i);
            if (!row.has_line_of(piece) || piece.offset < args.row_bytes || piece.offset >= row.bytes()) continue;
            place_scale_part(args, placement, piece.offset - args.row_bytes, piece.has_tag() ? 8 : 16, bytes);
        }
    }
}

// One warp places its run of a row in line form.
CROSSDOCK_DEVICE bool receive_lines(const Ctx& ctx, const auto& args, const Operation& operation,
                                    const Announced& announced, const ArrivingRow& row, const LineRow& shape,
                                    const LineRun& run, const Placement& placement) {
    constexpr uint32_t kGroupsAtOnce = 8;
    const auto& c = args.common;
    const std::byte* lines = row_at(c, operation, c.rank, slot_of(c, row.source, row.slot));
    const bool is_first = run.begin == 0;
    CROSSDOCK_ROLLED
    for (uint32_t first = run.begin; first < run.end; first += kGroupsAtOnce) {
        const uint32_t num = run.end - first < kGroupsAtOnce ? run.end - first : kGroupsAtOnce;
        LineWait<kGroupsAtOnce> wait;
        wait.missing = (1u << num) - 1;
        const auto look = [&] {
            wait.look(
                ctx, shape, operation.epoch, [&](uint32_t) { return lines; }, [&](uint32_t i) { return first + i; });
        };
        if (first != run.begin) {
            // The header has been read.
        } else if (c.expert_major || is_first) {
            if (!read_header(ctx, args, operation, announced, row, is_first, look, placement)) return false;
            ctx.mark(Step::kDispatchHeader);
        } else {
            if (is_leader(ctx)) {
                placement.rows[0] = static_cast<int32_t>(slot_of(c, row.source, row.slot));
                *placement.num = 1;
            }
            ctx.warp_sync();
        }
        const bool came = wait_as_warp(
            ctx, c.scope, operation, WaitStep::kRow,
            [&] {
                look();
                return wait.missing == 0 ? -1 : row.source;
            },
            [&] { return epoch_in_lines(ctx, lines, first + wait.first_missing()); });
        if (!came) return false;
        ctx.mark(Step::kDispatchArrived);
        CROSSDOCK_ROLLED
        for (int i = 0; i < *placement.num; ++i) {
            std::byte* target = args.out_tokens + static_cast<uint64_t>(placement.rows[i]) * args.row_bytes;
            CROSSDOCK_UNROLL
            for (uint32_t g = 0; g < kGroupsAtOnce; ++g) {
                if (g < num) wait.groups[g].write(ctx, shape, first + g, args.row_bytes, target);
            }
        }
        place_scales_of_lines(ctx, args, placement, shape, first, num, wait.groups);
    }
    if (is_leader(ctx) && is_first) {
        ctx.note_slot_read(c.rank, c.peers.at(c.rank, 0), operation.buffer, slot_of(c, row.source, row.slot),
                           operation.epoch);
    }
    ctx.warp_sync();
    ctx.mark(Step::kDispatchPlaced);
    return true;
}

// Rows that were announced for this warp, and those that came.
struct RowsRead {
    uint64_t expected = 0;
    uint64_t read = 0;
};

// Rows in line form, the sources in turn, as they come; neighbouring runs go to different blocks, so that all of them
// finish together, however few rows there are.
CROSSDOCK_DEVICE RowsRead receive_line_rows(const Ctx& ctx, const auto& args, const Operation& operation,
                                            const Announced& announced, const WorkShare& share,
                                            const Placement& placement) {
    const auto& c = args.common;
    RowsRead rows;
    const LineRow shape(line_row_bytes(args));
    const uint32_t warps = static_cast<uint32_t>(share.warps * share.num_blocks);
    const uint32_t line_rows = static_cast<uint32_t>(announced.lines[c.arena.num_ranks]) * c.arena.num_ranks;
    const LineParts parts = LineParts::of(shape, line_rows, warps);
    CROSSDOCK_ROLLED
    for (uint32_t i = static_cast<uint32_t>(share.warp(ctx) * share.num_blocks + share.block);
         i < line_rows * parts.num; i += warps) {
        const uint32_t number = i / parts.num;
        const uint32_t slot = number / c.arena.num_ranks;
        const ArrivingRow row{static_cast<int>(number - slot * c.arena.num_ranks), slot};
        if (static_cast<int>(slot) >= announced.lines[row.source]) continue;
        const LineRun run = parts.run(i % parts.num);
        const bool came = receive_lines(ctx, args, operation, announced, row, shape, run, placement);
        rows.expected += run.begin == 0 ? 1 : 0;
        rows.read += run.begin == 0 && came ? 1 : 0;
    }
    return rows;
}

CROSSDOCK_DEVICE RowsRead receive_plain_rows(const Ctx& ctx, const auto& args, const Operation& operation,
                                             const Announced& announced, const WorkShare& share,
                                             const Placement& placement, uint32_t& round) {
    const auto& c = args.common;
    RowsRead rows;
    const int warp = share.warp(ctx);
    const int stages = static_cast<int>(c.crew.receive_stages);
    if (warp >= stages) return rows;
    const RowStage stage = stage_of(ctx, args.shared, c.crew.num_stages + static_cast<uint32_t>(warp));
    ArrivingRow row;
    CROSSDOCK_ROLLED
    for (int i = warp * share.num_blocks + share.block; i < announced.plain_before[c.arena.num_ranks];
         i += stages * share.num_blocks) {
        row.advance(announced.plain_before, i);
        ++rows.expected;
        const bool came = receive_plain(ctx, args, operation, announced, row, placement, stage, round);
        rows.read += came ? 1 : 0;
    }
    return rows;
}

// Sources with another number of tokens than this rank may send the other form.
CROSSDOCK_DEVICE_RARE RowsRead receive_other_form(const Ctx& ctx, const auto& args, const Operation& operation,
                                                  const Announced& announced, const WorkShare& share,
                                                  const Placement& placement, uint32_t& round) {
    if (args.common.kForm == LlForm::kLines)
        return receive_plain_rows(ctx, args, operation, announced, share, placement, round);
    return receive_line_rows(ctx, args, operation, announced, share, placement);
}

CROSSDOCK_DEVICE void receive_tokens(const Ctx& ctx, const auto& args, const Operation& operation,
                                     const WorkShare& share, uint32_t& round) {
    const auto& c = args.common;
    const Announced announced = announced_in(ctx, args);
    gather_counts(ctx, c, operation, announced, share);
    if (ll_block_head(ctx)->is_refused != 0) return ctx.note_unread_slots_allowed();
    if (c.expert_major) scan_experts(ctx, args, announced, share);
    publish_counts(ctx, args, announced, share);
    ctx.mark(Step::kDispatchCounts);

    const Placement placement = placement_of_warp(ctx, args);
    RowsRead lines;
    RowsRead plain;
    const bool has_lines = announced.lines[c.arena.num_ranks] > 0;
    const bool has_plain = announced.plain_before[c.arena.num_ranks] > 0;
    if (c.kForm != LlForm::kPlain) {
        lines = receive_line_rows(ctx, args, operation, announced, share, placement);
    } else if (has_lines) {
        lines = receive_other_form(ctx, args, operation, announced, share, placement, round);
    }
    if (c.kForm != LlForm::kLines) {
        plain = receive_plain_rows(ctx, args, operation, announced, share, placement, round);
    } else if (has_plain) {
        plain = receive_other_form(ctx, args, operation, announced, share, placement, round);
    }
    if (is_leader(ctx)) {
        ctx.note_operation_read(c.rank, operation.epoch, lines.expected + plain.expected, lines.read + plain.read);
    }
    ctx.warp_sync();
}

}  // namespace CROSSDOCK_VARIANT
}  // namespace crossdock
