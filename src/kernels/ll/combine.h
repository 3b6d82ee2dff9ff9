// SPDX-License-Identifier: Apache-2.0
// Low-latency combine: one kernel, both halves or one of them. Here its receive half: a token's rows are summed in a
// fixed order as soon as they have arrived. contract: nccl_ep.h, ncclEpCombine; protocol: docs/protocol.md.
#pragma once

#include "kernels/ll/combine_send.h"

namespace crossdock {
inline namespace CROSSDOCK_VARIANT {

// Of the first ranks, bit by bit: those that have been seen to have entered alike. By a warp, for all its tokens: so
// that it costs them no time. This rank has, to itself.
inline constexpr int kRanksSeenAtOnce = 64;

CROSSDOCK_DEVICE uint64_t all_ranks(const auto& c) {
    return c.arena.num_ranks < kRanksSeenAtOnce ? (uint64_t{1} << c.arena.num_ranks) - 1 : ~uint64_t{0};
}

// What this lane's of a few ranks has entered with.
CROSSDOCK_DEVICE TaggedWord load_entry_for_lane(const Ctx& ctx, const auto& c, const Operation& operation, int base) {
    const int rank = base + ctx.lane();
    const bool is_asked = rank < static_cast<int>(c.arena.num_ranks) && rank != c.rank;
    return is_asked ? load_entry_of(ctx, c, operation, rank) : TaggedWord{};
}
CROSSDOCK_DEVICE uint64_t ranks_alike(const Ctx& ctx, const auto& c, const Operation& operation, int base,
                                      const TaggedWord& entry) {
    const int rank = base + ctx.lane();
    const bool is_alike =
        rank == c.rank || (rank < static_cast<int>(c.arena.num_ranks) && has_entered_alike(entry, c.scope, operation));
    return uint64_t{ctx.warp_ballot(is_alike)} << base;
}

CROSSDOCK_DEVICE uint64_t ranks_entered_alike(const Ctx& ctx, const auto& c, const Operation& operation) {
    const int num_ranks = static_cast<int>(c.arena.num_ranks);
    uint64_t alike = 0;
    CROSSDOCK_ROLLED
    for (int base = 0; base < num_ranks && base < kRanksSeenAtOnce; base += kLanes) {
        alike |= ranks_alike(ctx, c, operation, base, load_entry_for_lane(ctx, c, operation, base));
    }
    return alike;
}

// This lane's of a token's choices from `base` on.
CROSSDOCK_DEVICE int64_t choice_of_lane(const Ctx& ctx, const auto& c, uint32_t token, uint32_t base) {
    const uint32_t k = base + static_cast<uint32_t>(ctx.lane());
    return token < c.num_tokens ? given_id(c, token, k < c.topk ? k : base) : 0;
}

// Lists the cells of one token, in the order of its choices; those of masked ranks are left out. Returns how many.
// first_choice: choice_of_lane of the first choices. has_all: all of their ranks are among `alike`.
CROSSDOCK_DEVICE uint32_t list_cells(const Ctx& ctx, const auto& args, uint32_t token, int64_t first_choice,
                                     uint64_t alike, const TermList& terms, bool& has_all) {
    const auto& c = args.common;
    const bool per_choice = has_row_per_choice(args);
    has_all = true;
    int place = 0;  // ranks of the choices that all lanes have seen to
    int num = 0;
    CROSSDOCK_ROLLED
    for (uint32_t base = 0; has_choices_from(c, base); base += kLanes) {
        const uint32_t k = base + static_cast<uint32_t>(ctx.lane());
        const int64_t choice = base == 0 ? first_choice : choice_of_lane(ctx, c, token, base);
        const int rank = k < c.topk ? rank_of_expert(c, expert_of(c, choice)) : -1;
        const bool repeats = ctx.lanes_before_with(rank) != 0 || !is_first_of_rank(c, token, base, rank);
        const bool has_row = rank >= 0 && (per_choice || !repeats);
        const int own_place = place + ctx.warp_count_before(has_row);
        place += ctx.warp_count(has_row);
        const bool is_summed = has_row && is_active(ctx, c.scope, rank);
        const int at = num + ctx.warp_count_before(is_summed);
        num += ctx.warp_count(is_summed);
        const bool is_alike = rank < kRanksSeenAtOnce && (alike >> (rank & (kRanksSeenAtOnce - 1)) & 1) != 0;
        has_all = has_all && ctx.warp_all(!is_summed || is_alike);
        if (!is_summed) continue;
        terms.index[at] = static_cast<int64_t>(cell_index(c, token, per_choice ? k : static_cast<uint32_t>(own_place)));
        terms.weight[at] = per_choice ? args.topk_weights[uint64_t{token} * c.topk + k] : 1.0f;
        terms.ranks[at] = rank;
    }
    ctx.warp_sync();
    return static_cast<uint32_t>(num);
}

// The rows of a token that are not here yet: their ranks enter before they send. False: nothing is to be summed, since
// the group has failed.
CROSSDOCK_DEVICE bool wait_entries(const Ctx& ctx, const auto& c, const Operation& operation, uint32_t num,
                                   const TermList& terms) {
    bool came = true;
    CROSSDOCK_ROLLED
    for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < num; k += kLanes) {
        TaggedWord entry{};
        came = came && wait_entry(ctx, c, operation, terms.ranks[k], entry);
    }
    return ctx.warp_all(came) || !ctx.warp_any(has_failed(ctx, c.scope));
}

CROSSDOCK_DEVICE void note_cell_read(const Ctx& ctx, const auto& c, const Operation& operation, int64_t cell) {
    ctx.note_slot_read(c.rank, c.peers.at(c.rank, 0), operation.buffer, static_cast<uint64_t>(cell), operation.epoch);
}

// A cell that a rank elsewhere fills. Only where no row comes does it put a flag.
CROSSDOCK_DEVICE bool wait_far_cell(const Ctx& ctx, const auto& c, const Operation& operation, int rank,
                                    const uint64_t* flag, uint64_t& content) {
    uint64_t unused = 0;
    if (!wait_far(ctx, c, operation, WaitStep::kRow, Signal::kData, rank) ||
        !wait_word(ctx, c, operation, WaitStep::kRow, rank, count_words(c, operation, c.rank, rank), unused))
        return false;
    const uint64_t word = ctx.load_relaxed_system(flag);
    content = word_epoch(word) == operation.epoch ? word_payload(word) : uint64_t{kCellRow};
    return true;
}

// Cells in plain form: waits for their flags; what does not come is not summed.
CROSSDOCK_DEVICE void wait_for_cells(const Ctx& ctx, const auto& args, const Operation& operation, bool notes_reads,
                                     uint32_t num, const TermList& terms) {
    const auto& c = args.common;
    CROSSDOCK_ROLLED
    for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < num; k += kLanes) {
        uint64_t content = kCellNothing;
        const uint64_t* flag = row_flag(c, operation, c.rank, static_cast<uint32_t>(terms.index[k]));
        const bool came = is_remote(c.reach, terms.ranks[k])
                              ? wait_far_cell(ctx, c, operation, terms.ranks[k], flag, content)
                              : wait_word(ctx, c, operation, WaitStep::kRow, terms.ranks[k], flag, content);
        if (came && notes_reads) note_cell_read(ctx, c, operation, terms.index[k]);
        if (!came || content != kCellRow) terms.index[k] = -1;
    }
    ctx.warp_sync();
}

// Cells in line form: sums what comes of a run of groups. False: not all has come.
template <DType kDType>
CROSSDOCK_DEVICE bool sum_lines(const Ctx& ctx, const auto& args, const Operation& operation, uint32_t num,
                                const TermList& terms, const LineRow& shape, const LineRun& run, std::byte* out) {
    constexpr uint32_t kRowsAtOnce = 4;
    constexpr uint32_t kGroupsAtOnce = 2;
    const auto& c = args.common;
    bool has_all = true;
    CROSSDOCK_ROLLED
    for (uint32_t first = run.begin; first < run.end; first += kGroupsAtOnce) {
        const uint32_t groups = run.end - first < kGroupsAtOnce ? run.end - first : kGroupsAtOnce;
        LineSums<kDType> sums[kGroupsAtOnce];
        CROSSDOCK_ROLLED
        for (uint32_t base = 0; base < num; base += kRowsAtOnce) {
            const uint32_t rows = num - base < kRowsAtOnce ? num - base : kRowsAtOnce;
            // Bit g * kRowsAtOnce + r: group g of row r.
            const uint32_t expected = ((1u << rows) - 1) | (groups > 1 ? ((1u << rows) - 1) << kRowsAtOnce : 0);
            LineWait<kRowsAtOnce * kGroupsAtOnce> wait;
            wait.missing = expected;
            const bool came = wait_as_warp(
                ctx, c.scope, operation, WaitStep::kRow,
                [&] {
                    wait.look(
                        ctx, shape, operation.epoch,
                        [&](uint32_t i) {
                            return row_at(c, operation, c.rank,
                                          static_cast<uint32_t>(terms.index[base + i % kRowsAtOnce]));
                        },
                        [&](uint32_t i) { return first + i / kRowsAtOnce; });
                    return wait.missing == 0 ? -1 : terms.ranks[base + wait.first_missing() % kRowsAtOnce];
                },
                [&] {
                    const uint32_t i = wait.first_missing();
                    const uint32_t cell = static_cast<uint32_t>(terms.index[base + i % kRowsAtOnce]);
                    return epoch_in_lines(ctx, row_at(c, operation, c.rank, cell), first + i / kRowsAtOnce);
                });
            has_all = has_all && came;
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kRowsAtOnce * kGroupsAtOnce; ++i) {
                const uint32_t group = i / kRowsAtOnce;
                if (((expected & ~wait.missing) >> i & 1) == 0) continue;
                if (!ctx.warp_all(wait.groups[i].says(ctx, shape, first + group, kCellRow))) continue;
                sums[group].add(wait.groups[i], terms.weight[base + i % kRowsAtOnce]);
            }
        }
        CROSSDOCK_UNROLL
        for (uint32_t g = 0; g < kGroupsAtOnce; ++g) {
            if (g < groups) sums[g].rounded().write(ctx, shape, first + g, args.row_bytes, out);
        }
    }
    return has_all;
}

CROSSDOCK_DEVICE void sum_nvfp4_rows(const Ctx& ctx, const auto& args, const std::byte* cells, uint32_t count,
                                     const TermList& terms, uint32_t first, uint32_t num, std::byte* out) {
    const auto& c = args.common;
    const uint32_t elements = args.row_bytes / 2;
    CROSSDOCK_ROLLED
    for (uint32_t e = first + static_cast<uint32_t>(ctx.lane()); e < first + num; e += kLanes) {
        float sum = 0.0f;
        CROSSDOCK_ROLLED
        for (uint32_t k = 0; k < count; ++k) {
            if (terms.index[k] < 0) continue;
            const std::byte* wire = cells + static_cast<uint64_t>(terms.index[k]) * c.offsets.row_stride;
            const float value = nvfp4_element(wire, elements, e) * nvfp4_inverse_scale(wire, elements);
            sum = fused_multiply_add(terms.weight[k], value, sum);
        }
        store_element<DType::kBf16>(out, e, sum);
    }
}

// The part-th of a token's sum from cells in line form.
template <DType kDType>
CROSSDOCK_DEVICE void sum_token_of_lines(const Ctx& ctx, const auto& args, const Operation& operation, uint32_t num,
                                         const TermList& terms, const LineRow& shape, const LineRun& run,
                                         std::byte* out) {
    const bool notes = sum_lines<kDType>(ctx, args, operation, num, terms, shape, run, out) && run.begin == 0;
    CROSSDOCK_ROLLED
    for (uint32_t k = static_cast<uint32_t>(ctx.lane()); notes && k < num; k += kLanes) {
        note_cell_read(ctx, args.common, operation, terms.index[k]);
    }
}

// The same from cells in plain form.
template <DType kDType>
CROSSDOCK_DEVICE void sum_token_of_plain_rows(const Ctx& ctx, const auto& args, const Operation& operation,
                                              uint32_t num, const TermList& terms, uint32_t segment, std::byte* out) {
    const auto& c = args.common;
    const std::byte* cells = row_at(c, operation, c.rank, 0);
    const uint32_t first = segment * args.segment_bytes;
    const uint32_t bytes = args.row_bytes - first < args.segment_bytes ? args.row_bytes - first : args.segment_bytes;
    wait_for_cells(ctx, args, operation, first == 0, num, terms);
    ctx.mark(Step::kCombineArrived);
    const uint32_t element = first / dtype_bytes(kDType);
    const uint32_t elements = bytes / dtype_bytes(kDType);
    if (args.wire == LlCombineWire::kNvfp4) {
        sum_nvfp4_rows(ctx, args, cells, num, terms, element, elements, out);
    } else {
        sum_rows<kDType>(ctx, RowTerms{cells, c.offsets.row_stride, terms.index, terms.weight, num}, element, elements,
                         out);
    }
}

// Neighbouring tokens go to different blocks.
CROSSDOCK_DEVICE uint32_t first_work(const Ctx& ctx, const WorkShare& share) {
    return static_cast<uint32_t>(share.warp(ctx) * share.num_blocks + share.block);
}

// The choices of the first token that this warp sums, as list_cells wants them.
CROSSDOCK_DEVICE int64_t load_first_choice(const Ctx& ctx, const auto& c, const WorkShare& share) {
    if (!receives(c) || share.block < 0 || c.num_tokens == 0) return 0;
    return choice_of_lane(ctx, c, first_work(ctx, share) % c.num_tokens, 0);
}

// Work is shared by parts of tokens, so that few tokens still occupy many warps. early_entry: load_entry_for_lane of
// the first ranks, looked up so early that it is here by now.
template <DType kDType, RowForms kForms>
CROSSDOCK_DEVICE void sum_tokens(const Ctx& ctx, const auto& args, const LlCombineShared& shared,
                                 const Operation& operation, const WorkShare& share, int64_t first_choice,
                                 const TaggedWord& early_entry) {
    const auto& c = args.common;
    const bool in_lines = kForms == RowForms::kLines || (sends_in_lines(c) && allows_lines(args));
    const TermList terms = terms_of_warp(ctx, args, shared);
    const uint32_t step = static_cast<uint32_t>(share.num_blocks * share.warps);
    const LineRow shape(args.row_bytes);
    const LineParts parts = LineParts::of(shape, c.num_tokens, step);
    const uint32_t work = c.num_tokens * (in_lines ? parts.num : args.segments);
    uint64_t alike = ranks_alike(ctx, c, operation, 0, early_entry);
    if (alike != all_ranks(c)) alike = ranks_entered_alike(ctx, c, operation);
    CROSSDOCK_ROLLED
    for (uint32_t i = first_work(ctx, share); i < work; i += step) {
        const uint32_t part = i / c.num_tokens;
        const uint32_t token = i - part * c.num_tokens;
        std::byte* out = args.out_tokens + uint64_t{token} * args.row_bytes;
        bool has_all = false;
        const uint32_t num = list_cells(ctx, args, token, first_choice, alike, terms, has_all);
        ctx.mark(Step::kCombineListed);
        if (!has_all && !wait_entries(ctx, c, operation, num, terms)) {
            ctx.note_unread_slots_allowed();
        } else if (in_lines) {
            sum_token_of_lines<kDType>(ctx, args, operation, num, terms, shape, parts.run(part), out);
        } else {
            sum_token_of_plain_rows<kDType>(ctx, args, operation, num, terms, part, out);
        }
        if (!has_all) alike = ranks_entered_alike(ctx, c, operation);
        if (i + step < work) first_choice = choice_of_lane(ctx, c, (i + step) % c.num_tokens, 0);
        ctx.warp_sync();
        ctx.mark(Step::kCombineSummed);
    }
}

template <DType kDType, RowForms kForms>
CROSSDOCK_DEVICE void ll_combine(const Ctx& ctx, const auto& args) {
    const auto& c = args.common;
    const LlCombineShared& shared = args.shared;
    ctx.mark(Step::kCombineBegin);
    if (ctx.warp_idx() < static_cast<int>(c.crew.num_stages) && is_leader(ctx)) {
        stage_of(ctx, shared, static_cast<uint32_t>(ctx.warp_idx())).init();
        RowStage::initialised();
    }
    const uint32_t ticket = load_early_head(ctx, c);
    ctx.wait_for_previous_kernels();
    ctx.mark(Step::kCombineReady);
    const bool sends = (c.halves & kSendHalf) != 0;
    const int64_t first_choice = load_first_choice(ctx, c, first_share(ctx, c, ctx.num_warps()));
    if (sends && ctx.warp_idx() == 0) ReturnList(ctx, args, false).count(ctx, args);
    load_head(ctx, c, 0);
    if (sends) empty_outbox(ctx, c);
    ctx.block_sync();
    PlainReturns plain(ctx, args, shared);
    LineReturns lines(ctx, args);
    if (sends && !has_computed_rows(args) && sends_lines(ctx, c)) lines.begin(ctx);
    if (sends && returns_plain_rows<kForms>(ctx, args)) plain.begin(ctx);
    Operation operation;
    const bool runs = read_head(ctx, c, ticket, operation);
    ctx.mark(Step::kCombineHead);
    const TaggedWord early_entry = runs && receives(c) ? load_entry_for_lane(ctx, c, operation, 0) : TaggedWord{};
    if (runs && sends) return_tokens<kDType, kForms>(ctx, args, shared, operation, lines, plain);
    if (runs && sends) finish_returns(ctx, c, operation);
    if (runs && (c.halves & kCancel) != 0) await_stragglers(ctx, c, operation);
    if (!runs && sends && returns_plain_rows<kForms>(ctx, args)) plain.abandon(ctx);
    receive_for_good(ctx, c, operation, runs, ctx.num_warps(), [&](const WorkShare& share, bool is_first) {
        const int64_t choice = is_first ? first_choice : load_first_choice(ctx, c, share);
        sum_tokens<kDType, kForms>(ctx, args, shared, operation, share, choice, early_entry);
    });
    ctx.mark(Step::kCombineEnd);
}

}  // namespace CROSSDOCK_VARIANT
}  // namespace crossdock
