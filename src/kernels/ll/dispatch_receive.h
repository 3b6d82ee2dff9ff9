// SPDX-License-Identifier: Apache-2.0
// Dispatch, receive half: every arrived row is placed where its expert (expert-major) or its source (rank-major) wants
// it, in the order (source rank, token, k), while others are still under way.
#pragma once

#include "kernels/ll/dispatch_send.h"

namespace crossdock {
inline namespace CROSSDOCK_WORLD {

// What the sources have announced, in shared memory.
struct Announced {
    int* rows;           // [ranks]
    int* choices;        // [ranks] of experts here; expert-major
    int* plain_before;   // [ranks + 1]: rows in plain form of the sources below
    int* tagged_before;  // [ranks + 1]: the same in tagged form
    int* first_rows;     // [ranks][local experts]: where a source's rows of an expert begin; expert-major
};

CROSSDOCK_DEVICE Announced announced_in(const Ctx& ctx, const LlDispatchArgs& args) {
    const LlCommon& c = args.common;
    const LlDispatchShared& shared = args.shared;
    const uint32_t stride = c.arena.num_ranks + 1;
    int* received = reinterpret_cast<int*>(ctx.shared_memory() + shared.received);
    return {received, received + stride, received + 2 * stride, received + 3 * stride,
            reinterpret_cast<int*>(ctx.shared_memory() + shared.first_rows)};
}

// Waits for every source's counts; sources that are masked count as silent.
CROSSDOCK_DEVICE void gather_counts(const Ctx& ctx, const LlCommon& c, const Operation& operation,
                                    const Announced& announced, const Share& share) {
    const int num_ranks = static_cast<int>(c.arena.num_ranks);
    const int experts = c.expert_major ? static_cast<int>(c.offsets.experts_per_rank) : 0;
    CROSSDOCK_ROLLED
    for (int source = share.warp(ctx); source < num_ranks; source += share.warps) {
        const uint64_t* words = count_words(c, operation, c.rank, source);
        int choices = 0;
        CROSSDOCK_ROLLED
        for (int i = ctx.lane(); i <= experts; i += kLanes) {
            const uint64_t count = wait_count(ctx, c, operation, source, words + i);
            if (i == 0) {
                announced.rows[source] = static_cast<int>(count % kTaggedRows);
                announced.tagged_before[source + 1] = count / kTaggedRows != 0 ? 1 : 0;
            } else {
                announced.first_rows[source * experts + i - 1] = static_cast<int>(count);
                choices += static_cast<int>(count);
            }
        }
        choices = ctx.warp_sum(choices);
        if (is_leader(ctx)) announced.choices[source] = choices;
    }
    share.sync(ctx);
}

// Turns counts into first rows; the total of an expert, at most its capacity, goes to the caller.
CROSSDOCK_DEVICE void scan_experts(const Ctx& ctx, const LlDispatchArgs& args, const Announced& announced,
                                   const Share& share) {
    const LlCommon& c = args.common;
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
        if (share.block == 0) args.counters[expert] = rows < capacity ? rows : capacity;
    }
}

// What a later combine must know, and how many rows of either form the sources below have. Then the counts are complete
// for the whole block.
CROSSDOCK_DEVICE void publish_counts(const Ctx& ctx, const LlDispatchArgs& args, const Announced& announced,
                                     const Share& share) {
    const LlCommon& c = args.common;
    const int num_ranks = static_cast<int>(c.arena.num_ranks);
    if (share.block == 0) {
        CROSSDOCK_ROLLED
        for (int source = share.thread(ctx); source < num_ranks; source += share.threads()) {
            const uint32_t rows = static_cast<uint32_t>(announced.rows[source]);
            const uint32_t choices = c.expert_major ? static_cast<uint32_t>(announced.choices[source]) : 0;
            *received_from(c, source) = {rows, choices, static_cast<uint32_t>(announced.tagged_before[source + 1]), 0};
            if (!c.expert_major && args.counters != nullptr) args.counters[source] = announced.rows[source];
        }
        share.sync(ctx);
    }
    if (share.thread(ctx) == 0) {
        announced.plain_before[0] = 0;
        announced.tagged_before[0] = 0;
        CROSSDOCK_ROLLED
        for (int source = 0; source < num_ranks; ++source) {
            const int rows = announced.rows[source];
            const bool is_tagged = announced.tagged_before[source + 1] != 0;
            announced.plain_before[source + 1] = announced.plain_before[source] + (is_tagged ? 0 : rows);
            announced.tagged_before[source + 1] = announced.tagged_before[source] + (is_tagged ? rows : 0);
        }
    }
    share.sync(ctx);
    if (c.expert_major) return;
    const uint32_t threads = static_cast<uint32_t>(share.num_blocks * share.threads());
    const uint32_t thread = static_cast<uint32_t>(share.block * share.threads() + share.thread(ctx));
    CROSSDOCK_ROLLED
    for (int source = 0; source < num_ranks; ++source) {
        int32_t* ids = args.out_topk_idx + uint64_t{plain_slot(c, source, 0)} * c.topk;
        const uint32_t used = static_cast<uint32_t>(announced.rows[source]) * c.topk;
        CROSSDOCK_ROLLED
        for (uint32_t i = used + thread; i < c.arena.max_tokens * c.topk; i += threads) ids[i] = -1;
    }
}

// A row's scales at out row `row_idx` of expert `expert` (expert-major) or of all (rank-major, expert 0).
CROSSDOCK_DEVICE void place_scales(const Ctx& ctx, const LlDispatchArgs& args, const std::byte* scales, uint64_t expert,
                                   uint64_t row_idx) {
    const uint64_t capacity = args.common.offsets.num_slots;
    if (!args.transposed_scales) {
        copy_words(ctx, args.out_scales + (expert * capacity + row_idx) * args.scale_bytes, scales, args.scale_bytes);
        return;
    }
    const uint32_t blocks = args.scale_bytes / 4;
    float* target = reinterpret_cast<float*>(args.out_scales) + expert * capacity * blocks + row_idx;
    CROSSDOCK_ROLLED
    for (uint32_t block = static_cast<uint32_t>(ctx.lane()); block < blocks; block += kLanes) {
        target[block * capacity] = reinterpret_cast<const float*>(scales)[block];
    }
}

// Where a warp's current row goes, in shared memory.
struct Placement {
    int32_t* rows;  // [num] indices among all out rows
    int32_t* num;
    uint32_t* direct;
};

CROSSDOCK_DEVICE Placement placement_of_warp(const Ctx& ctx, const LlDispatchArgs& args) {
    const LlCommon& c = args.common;
    int32_t* words = reinterpret_cast<int32_t*>(ctx.shared_memory() + args.shared.placements) +
                     uint64_t{c.topk + 2} * static_cast<uint32_t>(ctx.warp_idx());
    return {words, words + c.topk, reinterpret_cast<uint32_t*>(words + c.topk + 1)};
}

// One choice of a received row, for an expert here: its out row, or -1 past the expert's capacity (only duplicates can
// fill it).
CROSSDOCK_DEVICE int32_t row_of_choice(const LlCommon& c, const Announced& announced, const ReceivedRow& row,
                                       uint64_t payload) {
    const uint32_t experts = c.offsets.experts_per_rank;
    const uint32_t expert = static_cast<uint32_t>(payload) - static_cast<uint32_t>(c.rank) * experts;
    const uint32_t first =
        static_cast<uint32_t>(announced.first_rows[static_cast<uint32_t>(row.source) * experts + expert]);
    const uint32_t row_of_expert = first + static_cast<uint32_t>(payload >> 32);
    return row_of_expert < c.offsets.num_slots ? static_cast<int32_t>(expert * c.offsets.num_slots + row_of_expert)
                                               : -1;
}

// Waits for a row's header and finds out where the row goes; with it for one pair of the row's own words, if any
// (tagged form). Whoever writes also fills in what the caller and a later combine want to know of it. One warp; false:
// it will not come.
CROSSDOCK_DEVICE bool read_header(const Ctx& ctx, const LlDispatchArgs& args, const Operation& operation,
                                  const Announced& announced, const ReceivedRow& row, bool writes,
                                  const TaggedWord* pair_words, TaggedPair& pair, const Placement& placement) {
    const LlCommon& c = args.common;
    const uint32_t slot = plain_slot(c, row.source, row.slot);
    const TaggedWord* words = header_words(c, operation, c.rank, slot);
    RowRecord* record = row_record(c, row.source, row.slot);
    int num = 0;      // out rows so far
    int choices = 0;  // for experts here so far
    CROSSDOCK_ROLLED
    for (uint32_t base = 0; base < c.topk; base += kLanes) {
        const uint32_t k = base + static_cast<uint32_t>(ctx.lane());
        const bool is_choice = k < c.topk;
        TaggedPair header{};
        const bool came = wait_tagged(
            ctx, c, operation, WaitStep::kRow, row.source,
            [&] {
                header = {ctx.load_tagged(words), ctx.load_tagged(words + 1 + (is_choice ? k : 0))};
                if (pair_words != nullptr) pair = TaggedPair::load(ctx, pair_words);
            },
            [&] { return header.is_of(operation) && (pair_words == nullptr || pair.is_of(operation)); });
        if (!ctx.warp_all(came)) return false;
        const RowLabel label = RowLabel::of(header.first.payload);
        if (base == 0 && is_leader(ctx)) {
            *placement.direct = label.direct & args.direct;
            if (writes) *record = {label.token_idx, cell_index(c, label.token_idx, label.place)};
        }
        const int32_t id = static_cast<int32_t>(static_cast<uint32_t>(header.second.payload));
        const bool is_here = is_choice && rank_of_expert(c, id) == c.rank;
        int32_t row_idx = -1;
        if (c.expert_major) {
            if (is_here) row_idx = row_of_choice(c, announced, row, header.second.payload);
            const uint32_t number =
                label.first_choice + static_cast<uint32_t>(choices + ctx.warp_sum_before(is_here ? 1 : 0));
            if (is_here && writes) *choice_of(c, row.source, number) = {row_idx, cell_index(c, label.token_idx, k)};
            if (is_choice && writes) reinterpret_cast<int32_t*>(record + 1)[k] = row_idx;
            choices += ctx.warp_sum(is_here ? 1 : 0);
        } else if (is_choice && writes) {
            const int32_t first_expert = c.rank * static_cast<int32_t>(c.offsets.experts_per_rank);
            args.out_topk_idx[uint64_t{slot} * c.topk + k] = !is_here ? -1 : args.global_ids ? id : id - first_expert;
            args.out_weights[uint64_t{slot} * c.topk + k] =
                float_of(static_cast<uint32_t>(header.second.payload >> 32));
        }
        const int at = num + ctx.warp_sum_before(row_idx >= 0 ? 1 : 0);
        if (row_idx >= 0) placement.rows[at] = row_idx;
        num += ctx.warp_sum(row_idx >= 0 ? 1 : 0);
    }
    if (is_leader(ctx)) {
        if (!c.expert_major) placement.rows[0] = static_cast<int32_t>(slot);
        *placement.num = c.expert_major ? num : 1;
    }
    ctx.warp_sync();
    return true;
}

CROSSDOCK_DEVICE void place_all_scales(const Ctx& ctx, const LlDispatchArgs& args, const Placement& placement,
                                       const std::byte* scales) {
    if (args.scale_bytes == 0) return;
    const uint64_t rows_of_expert = args.common.expert_major ? args.common.offsets.num_slots : ~uint64_t{0};
    CROSSDOCK_ROLLED
    for (int i = 0; i < *placement.num; ++i) {
        const uint64_t row = static_cast<uint64_t>(placement.rows[i]);
        place_scales(ctx, args, scales, row / rows_of_expert, row % rows_of_expert);
    }
}

// 16 bytes of a row's scales, from byte `first` of them on.
CROSSDOCK_DEVICE void place_scale_part(const LlDispatchArgs& args, const Placement& placement, uint32_t first,
                                       const Bytes16& part) {
    const uint64_t capacity = args.common.offsets.num_slots;
    const uint32_t scales = args.scale_bytes / 4;
    CROSSDOCK_ROLLED
    for (int i = 0; i < *placement.num; ++i) {
        const uint64_t row = static_cast<uint64_t>(placement.rows[i]);
        uint32_t* all = reinterpret_cast<uint32_t*>(args.out_scales);
        CROSSDOCK_ROLLED
        for (uint32_t j = 0; j < 4 && first / 4 + j < scales; ++j) {
            const uint32_t value = static_cast<uint32_t>((j < 2 ? part.low : part.high) >> (32 * (j % 2)));
            const uint64_t scale = first / 4 + j;
            all[args.transposed_scales ? (row / capacity * scales + scale) * capacity + row % capacity
                                       : row * scales + scale] = value;
        }
    }
}

// One warp places a row in plain form, through its stage.
CROSSDOCK_DEVICE bool receive_plain(const Ctx& ctx, const LlDispatchArgs& args, const Operation& operation,
                                    const Announced& announced, const ReceivedRow& row, const Placement& placement,
                                    const RowStage& stage, uint32_t& round) {
    const LlCommon& c = args.common;
    TaggedPair unused_pair{};
    if (!read_header(ctx, args, operation, announced, row, true, nullptr, unused_pair, placement)) return false;
    ctx.mark(Step::kDispatchHeader);
    const uint32_t slot = plain_slot(c, row.source, row.slot);
    uint64_t unused = 0;
    const bool arrived = is_leader(ctx) && wait_word(ctx, c, operation, WaitStep::kRow, row.source,
                                                     row_flag(c, operation, c.rank, slot), unused);
    if (ctx.warp_broadcast(arrived ? 1u : 0u) == 0) return false;
    ctx.mark(Step::kDispatchArrived);
    ctx.fence_async_copies();  // the flag was read by an ordinary load, the row is read by an asynchronous copy
    const std::byte* source = plain_row(c, operation, c.rank, slot);
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

CROSSDOCK_DEVICE bool wait_pair(const Ctx& ctx, const LlCommon& c, const Operation& operation, int source,
                                const TaggedWord* words, TaggedPair& pair) {
    return wait_tagged(
        ctx, c, operation, WaitStep::kRow, source, [&] { pair = TaggedPair::load(ctx, words); },
        [&] { return pair.is_of(operation); });
}

// One warp places a segment of a row in tagged form; the row's first segment also places its scales.
CROSSDOCK_DEVICE bool receive_tagged(const Ctx& ctx, const LlDispatchArgs& args, const Operation& operation,
                                     const Announced& announced, const ReceivedRow& row, uint32_t segment,
                                     const Placement& placement) {
    const LlCommon& c = args.common;
    const TaggedWord* words = tagged_row(c, operation, c.rank, tagged_slot(c, row.source, row.slot));
    const uint32_t begin = segment * kTaggedSegmentBytes;
    const uint32_t end = begin + kTaggedSegmentBytes < args.row_bytes ? begin + kTaggedSegmentBytes : args.row_bytes;
    uint32_t at = begin + 16 * static_cast<uint32_t>(ctx.lane());
    TaggedPair pair{};
    const TaggedWord* first_words = at < end ? words + at / 8 : nullptr;
    bool has_pair = false;
    if (c.expert_major || segment == 0) {
        if (!read_header(ctx, args, operation, announced, row, segment == 0, first_words, pair, placement))
            return false;
        has_pair = true;
    } else if (is_leader(ctx)) {
        placement.rows[0] = static_cast<int32_t>(plain_slot(c, row.source, row.slot));
        *placement.num = 1;
    }
    ctx.warp_sync();
    ctx.mark(Step::kDispatchHeader);
    bool came = true;
    CROSSDOCK_ROLLED
    for (; came && at < end; at += 16 * kLanes, has_pair = false) {
        if (!has_pair) came = wait_pair(ctx, c, operation, row.source, words + at / 8, pair);
        CROSSDOCK_ROLLED
        for (int i = 0; came && i < *placement.num; ++i) {
            std::byte* target = args.out_tokens + static_cast<uint64_t>(placement.rows[i]) * args.row_bytes;
            *reinterpret_cast<Bytes16*>(target + at) = pair.payload();
        }
    }
    const uint32_t scale_area = segment == 0 ? static_cast<uint32_t>(align_up(args.scale_bytes, 16)) : 0;
    CROSSDOCK_ROLLED
    for (at = 16 * static_cast<uint32_t>(ctx.lane()); came && at < scale_area; at += 16 * kLanes) {
        came = wait_pair(ctx, c, operation, row.source, words + (args.row_bytes + at) / 8, pair);
        if (came) place_scale_part(args, placement, at, pair.payload());
    }
    if (!ctx.warp_all(came)) return false;
    if (is_leader(ctx) && segment == 0) {
        ctx.note_slot_read(c.rank, c.peers.at(c.rank, 0), operation.buffer, plain_slot(c, row.source, row.slot),
                           operation.epoch);
    }
    ctx.warp_sync();
    ctx.mark(Step::kDispatchPlaced);
    return true;
}

CROSSDOCK_DEVICE void receive_tokens(const Ctx& ctx, const LlDispatchArgs& args, const Operation& operation,
                                     const Share& share, uint32_t& round) {
    const LlCommon& c = args.common;
    const Announced announced = announced_in(ctx, args);
    gather_counts(ctx, c, operation, announced, share);
    if (c.expert_major) scan_experts(ctx, args, announced, share);
    publish_counts(ctx, args, announced, share);
    ctx.mark(Step::kDispatchCounts);

    const Placement placement = placement_of_warp(ctx, args);
    const int warp = share.warp(ctx);
    uint64_t rows_expected = 0;
    uint64_t rows_read = 0;
    // Neighbouring pieces go to different blocks: all blocks finish together, however few rows there are.
    const int segments = static_cast<int>(tagged_segments(args.row_bytes));
    ReceivedRow row;
    CROSSDOCK_ROLLED
    for (int i = warp * share.num_blocks + share.block; i < announced.tagged_before[c.arena.num_ranks] * segments;
         i += share.warps * share.num_blocks) {
        row.advance(announced.tagged_before, i / segments);
        const uint32_t segment = static_cast<uint32_t>(i % segments);
        const bool came = receive_tagged(ctx, args, operation, announced, row, segment, placement);
        rows_expected += segment == 0 ? 1 : 0;
        rows_read += segment == 0 && came ? 1 : 0;
    }
    const int stages = static_cast<int>(args.common.crew.receive_stages);
    if (warp < stages) {
        const RowStage stage = stage_of(ctx, args.shared, c.crew.num_stages + static_cast<uint32_t>(warp));
        row = ReceivedRow{};
        CROSSDOCK_ROLLED
        for (int i = warp * share.num_blocks + share.block; i < announced.plain_before[c.arena.num_ranks];
             i += stages * share.num_blocks) {
            row.advance(announced.plain_before, i);
            ++rows_expected;
            const bool came = receive_plain(ctx, args, operation, announced, row, placement, stage, round);
            rows_read += came ? 1 : 0;
        }
    }
    if (is_leader(ctx)) ctx.note_operation_read(c.rank, operation.epoch, rows_expected, rows_read);
    ctx.warp_sync();
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
