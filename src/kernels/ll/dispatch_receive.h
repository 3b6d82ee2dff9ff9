// SPDX-License-Identifier: Apache-2.0
// Dispatch, receive half: every arrived row is placed where its expert (expert-major) or its source (rank-major) wants
// it, in the order (source rank, token, k), while others are still under way.
#pragma once

#include "kernels/ll/dispatch_send.h"

namespace crossdock {
inline namespace CROSSDOCK_WORLD {

// Which blocks share the receive half; after a loss the last block does all of it.
struct Share {
    int block = 0;
    int num_blocks = 1;
};

struct Announced {
    int* rows_before;  // [ranks + 1]: rows of the sources below
    int* first_rows;   // [ranks][local experts]: where a source's rows of an expert begin; expert-major
};

// Waits for every source's counts; sources that are masked count as silent.
CROSSDOCK_DEVICE void gather_counts(const Ctx& ctx, const LlCommon& c, const Operation& operation,
                                    const Announced& announced) {
    const int num_ranks = static_cast<int>(c.arena.num_ranks);
    const int experts = c.expert_major ? static_cast<int>(c.arena.experts_per_rank()) : 0;
    const int words_per_source = 1 + experts;
    for (int i = thread_idx(ctx); i < num_ranks * words_per_source; i += num_threads(ctx)) {
        const int source = i / words_per_source;
        const int word = i % words_per_source;
        uint64_t count = 0;
        if (!is_active(ctx, c.scope, source) ||
            !wait_word(ctx, c, operation, WaitStep::kCounts, source,
                       count_words(c, c.rank, operation.buffer, source) + word, count)) {
            count = 0;
        }
        if (word == 0) {
            announced.rows_before[source + 1] = static_cast<int>(count);
        } else {
            announced.first_rows[source * experts + word - 1] = static_cast<int>(count);
        }
    }
    ctx.block_sync();
    if (thread_idx(ctx) == 0) {
        announced.rows_before[0] = 0;
        for (int source = 0; source < num_ranks; ++source)
            announced.rows_before[source + 1] += announced.rows_before[source];
    }
    ctx.block_sync();
}

// Turns counts into first rows; the total of an expert, at most its capacity, goes to the caller.
CROSSDOCK_DEVICE void scan_experts(const Ctx& ctx, const LlDispatchArgs& args, const Announced& announced,
                                   bool writes_counters) {
    const LlCommon& c = args.common;
    const int experts = static_cast<int>(c.arena.experts_per_rank());
    const int capacity = static_cast<int>(c.arena.num_slots());
    for (int expert = thread_idx(ctx); expert < experts; expert += num_threads(ctx)) {
        int rows = 0;
        for (int source = 0; source < static_cast<int>(c.arena.num_ranks); ++source) {
            const int count = announced.first_rows[source * experts + expert];
            announced.first_rows[source * experts + expert] = rows;
            rows += count;
        }
        if (writes_counters) args.counters[expert] = rows < capacity ? rows : capacity;
    }
    ctx.block_sync();
}

// What a later combine must know, and the rank-major counters and unused ids.
CROSSDOCK_DEVICE void publish_counts(const Ctx& ctx, const LlDispatchArgs& args, const Announced& announced,
                                     const Share& share) {
    const LlCommon& c = args.common;
    const int num_ranks = static_cast<int>(c.arena.num_ranks);
    if (share.block == 0) {
        for (int source = thread_idx(ctx); source < num_ranks; source += num_threads(ctx)) {
            const int rows = announced.rows_before[source + 1] - announced.rows_before[source];
            handle_row_counts(c)[source] = rows;
            if (!c.expert_major && args.counters != nullptr) args.counters[source] = rows;
        }
        if (c.expert_major) {
            for (int i = thread_idx(ctx); i < static_cast<int>(c.arena.num_experts); i += num_threads(ctx)) {
                handle_first_rows(c, 0)[i] = announced.first_rows[i];
            }
        }
    }
    if (c.expert_major) return;
    const uint64_t threads = static_cast<uint64_t>(share.num_blocks) * static_cast<uint64_t>(num_threads(ctx));
    const uint64_t first = static_cast<uint64_t>(share.block) * static_cast<uint64_t>(num_threads(ctx)) +
                           static_cast<uint64_t>(thread_idx(ctx));
    for (uint64_t i = first; i < c.arena.num_slots() * c.topk; i += threads) {
        const int source = static_cast<int>(i / c.topk / c.arena.max_tokens);
        const int slot = static_cast<int>(i / c.topk % c.arena.max_tokens);
        if (slot >= announced.rows_before[source + 1] - announced.rows_before[source]) args.out_topk_idx[i] = -1;
    }
}

// A row's scales at out row `row_idx` of expert `expert` (expert-major) or of all (rank-major, expert 0).
CROSSDOCK_DEVICE void place_scales(const Ctx& ctx, const LlDispatchArgs& args, const std::byte* scales, uint64_t expert,
                                   uint64_t row_idx) {
    if (args.scale_bytes == 0) return;
    const uint64_t capacity = args.common.arena.num_slots();
    if (!args.transposed_scales) {
        copy_words(ctx, args.out_scales + (expert * capacity + row_idx) * args.scale_bytes, scales, args.scale_bytes);
        return;
    }
    const uint32_t blocks = args.scale_bytes / 4;
    float* target = reinterpret_cast<float*>(args.out_scales) + expert * capacity * blocks + row_idx;
    for (uint32_t block = static_cast<uint32_t>(ctx.lane()); block < blocks; block += kLanes) {
        target[block * capacity] = reinterpret_cast<const float*>(scales)[block];
    }
}

// The out row of a choice, or -1: another rank's expert, dropped, or past the expert's capacity (only duplicates can
// fill it).
CROSSDOCK_DEVICE int64_t row_of_choice(const LlCommon& c, const int32_t* ids, const int32_t* first_rows, uint32_t k) {
    if (rank_of_expert(c, ids[k]) != c.rank) return -1;
    const uint32_t expert = static_cast<uint32_t>(ids[k]) % c.arena.experts_per_rank();
    const uint64_t row = static_cast<uint64_t>(first_rows[expert] + ids[c.topk + k]);
    return row < c.arena.num_slots() ? static_cast<int64_t>(expert * c.arena.num_slots() + row) : -1;
}

// One warp places one row, whose flag it has seen.
CROSSDOCK_DEVICE void place_row(const Ctx& ctx, const LlDispatchArgs& args, const LlDispatchShared& shared,
                                const Operation& operation, RowStage& stage, const Announced& announced,
                                const ReceivedRow& row) {
    const LlCommon& c = args.common;
    const uint64_t slot = static_cast<uint64_t>(row.source) * c.arena.max_tokens + row.slot;
    const std::byte* source = slot_of(c, c.rank, operation.buffer, slot);
    std::byte* tail = stage.fill() + shared.tail;
    const uint32_t scale_area = static_cast<uint32_t>(align_up(args.scale_bytes, 16));
    const uint32_t tail_bytes = scale_area + row_header_bytes(c.topk);

    copy_words(ctx, tail, source + args.row_bytes, tail_bytes);
    ctx.warp_sync();
    const RowHeader* header = reinterpret_cast<const RowHeader*>(tail + scale_area);
    const int32_t* ids = reinterpret_cast<const int32_t*>(header + 1);
    const int32_t* first_rows = announced.first_rows + static_cast<uint64_t>(row.source) * c.arena.experts_per_rank();
    const uint32_t direct = header->direct & args.direct;
    copy_words(ctx, handle_header(c, row.source, row.slot), header, row_header_bytes(c.topk));

    if (c.expert_major) {
        for (uint32_t k = 0; k < c.topk; ++k) {
            const int64_t target = row_of_choice(c, ids, first_rows, k);
            if (target >= 0)
                place_scales(ctx, args, tail, static_cast<uint64_t>(target) / c.arena.num_slots(),
                             static_cast<uint64_t>(target) % c.arena.num_slots());
        }
    } else {
        if ((direct & kDirectScales) == 0) place_scales(ctx, args, tail, 0, slot);
        const int32_t first_expert = c.rank * static_cast<int32_t>(c.arena.experts_per_rank());
        for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < c.topk; k += kLanes) {
            const bool is_here = rank_of_expert(c, ids[k]) == c.rank;
            args.out_topk_idx[slot * c.topk + k] = !is_here ? -1 : args.global_ids ? ids[k] : ids[k] - first_expert;
            args.out_weights[slot * c.topk + k] = reinterpret_cast<const float*>(ids)[c.topk + k];
        }
    }
    for (uint32_t first = 0; first < args.row_bytes && (direct & kDirectTokens) == 0; first += c.chunk_bytes) {
        const uint32_t left = args.row_bytes - first;
        const uint32_t chunk = left < c.chunk_bytes ? left : c.chunk_bytes;
        stage.load(ctx, source + first, chunk);
        stage.wait_loaded(ctx);
        if (is_leader(ctx)) {
            if (c.expert_major) {
                for (uint32_t k = 0; k < c.topk; ++k) {
                    const int64_t target = row_of_choice(c, ids, first_rows, k);
                    if (target >= 0)
                        stage.store(ctx, args.out_tokens + static_cast<uint64_t>(target) * args.row_bytes + first, 0,
                                    chunk);
                }
            } else {
                stage.store(ctx, args.out_tokens + slot * args.row_bytes + first, 0, chunk);
            }
            stage.end_group(ctx);
        }
        stage.wait_reusable(ctx);
    }
    ctx.warp_sync();  // before the tail is written again
    if (is_leader(ctx)) ctx.note_slot_read(c.rank, c.peers.at(c.rank, 0), operation.buffer, slot, operation.epoch);
}

CROSSDOCK_DEVICE void receive_tokens(const Ctx& ctx, const LlDispatchArgs& args, const LlDispatchShared& shared,
                                     const Operation& operation, RowStage& stage, const Share& share) {
    const LlCommon& c = args.common;
    const Announced announced{reinterpret_cast<int*>(ctx.shared_memory() + shared.rank_counts),
                              reinterpret_cast<int*>(ctx.shared_memory() + shared.expert_counts)};
    gather_counts(ctx, c, operation, announced);
    if (c.expert_major) scan_experts(ctx, args, announced, share.block == 0);
    publish_counts(ctx, args, announced, share);

    const int total = announced.rows_before[c.arena.num_ranks];
    const int warps = share.num_blocks * ctx.num_warps();
    ReceivedRow row;
    uint64_t rows_expected = 0;
    uint64_t rows_read = 0;
    // Neighbouring rows go to different blocks: all blocks finish together, however few rows there are.
    for (int i = ctx.warp_idx() * share.num_blocks + share.block; i < total; i += warps) {
        row.advance(announced.rows_before, i);
        ++rows_expected;
        uint64_t unused = 0;
        const uint64_t slot = static_cast<uint64_t>(row.source) * c.arena.max_tokens + row.slot;
        const bool arrived = is_leader(ctx) && wait_word(ctx, c, operation, WaitStep::kRow, row.source,
                                                         row_flag(c, c.rank, operation.buffer, slot), unused);
        ctx.fence_async_copies();  // the flag was read by an ordinary load, the row is read by an asynchronous copy
        if (ctx.warp_broadcast(arrived ? 1u : 0u) == 0) continue;
        ++rows_read;
        place_row(ctx, args, shared, operation, stage, announced, row);
    }
    if (is_leader(ctx)) {
        stage.wait_stores(ctx);
        ctx.note_operation_read(c.rank, operation.epoch, rows_expected, rows_read);
    }
    ctx.warp_sync();
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
