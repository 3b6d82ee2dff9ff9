// SPDX-License-Identifier: Apache-2.0
// The part of an LL arena after its buffers, in groups of several LSA teams: signals, and the outbox, from which rows,
// headers, counts and weights are put. One outbox per arena: an operation writes into it after the network has read the
// previous contents.
#pragma once

#include "kernels/ll/geometry.h"
#include "kernels/reach.h"

namespace crossdock {

inline constexpr uint32_t kFewestOutboxRows = 64;  // warps that return a row each

struct LlOutbox {
    // Byte offsets inside the arena; each is the end of the part before it.
    uint64_t counts;   // u64 [ranks][1 + local experts]
    uint64_t headers;  // TaggedWord [ranks][tokens][1 + topk], as in the peer's buffer
    uint64_t weights;  // TaggedWord [tokens][weight words]
    uint64_t rows;     // [num_rows]
    uint32_t num_rows;

    static constexpr uint32_t rows_of(const LlGeometry& arena) {
        const uint64_t cells = arena.num_cells();  // as many rows as return here, if all ranks send the same number
        return static_cast<uint32_t>(cells > kFewestOutboxRows ? cells : kFewestOutboxRows);
    }
    static constexpr uint64_t signals_offset(const LlGeometry& arena) { return align_up(arena.arena_bytes(), 128); }
    static constexpr uint64_t raised_offset(const LlGeometry& arena) {
        return signals_offset(arena) + align_up(uint64_t{8} * kNumSignals * arena.num_ranks, 128);
    }
    static constexpr uint64_t barrier_offset(const LlGeometry& arena) {
        return raised_offset(arena) + align_up(uint64_t{8} * kNumSignals * arena.num_ranks, 128);
    }
    static constexpr uint64_t traffic_offset(const LlGeometry& arena) {
        return barrier_offset(arena) + align_up(uint64_t{32} * arena.num_ranks, 128);
    }
    static constexpr LlOutbox of(const LlGeometry& arena) {
        LlOutbox outbox{};
        outbox.counts = traffic_offset(arena) + align_up(uint64_t{8} * kNumTraffic, 128);
        outbox.headers = align_up(outbox.counts + 8 * arena.num_ranks * arena.count_words_per_source(), 128);
        outbox.weights = align_up(outbox.headers + 16 * arena.num_slots() * arena.header_words(), 128);
        outbox.rows = align_up(outbox.weights + 16 * uint64_t{arena.max_tokens} * arena.weight_words(), 128);
        outbox.num_rows = rows_of(arena);
        return outbox;
    }
    // Of the whole arena.
    static constexpr uint64_t arena_bytes(const LlGeometry& arena) {
        const LlOutbox outbox = of(arena);
        return outbox.rows + outbox.num_rows * arena.row_stride();
    }
};

}  // namespace crossdock
