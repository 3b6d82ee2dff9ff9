// SPDX-License-Identifier: Apache-2.0
// The part of an LL arena after its buffers, in groups of several LSA teams: signals, and the outbox, from which rows,
// counts and weights are put. One outbox per arena: an operation writes into it after the network has read the previous
// contents.
#pragma once

#include "kernels/ll/geometry.h"
#include "kernels/reach.h"

namespace crossdock {

struct LlOutbox {
    Region<uint64_t> counts;     // [ranks][1 + local experts]
    Region<TaggedWord> weights;  // [tokens][weight words]
    Region<std::byte> rows;      // [num_rows], as in the peer's buffer; those for one peer are consecutive
    uint32_t num_rows;
};

struct LlOutboxLayout {
    GinWords words;
    LlOutbox outbox;
    uint64_t bytes;  // of the whole arena

    static constexpr LlOutboxLayout of(const LlGeometry& geometry) {
        const LlArenaLayout before = LlArenaLayout::of(geometry);
        const LlOffsets& in_buffer = before.offsets;
        LlOutboxLayout layout{};
        LlOutbox& outbox = layout.outbox;
        // All rows of a dispatch: each of them has a cell. A combine may fill the outbox several times.
        outbox.num_rows = static_cast<uint32_t>(geometry.num_cells());
        Cursor arena(128, before.bytes);
        layout.words.lay_out(arena, geometry.num_ranks);
        arena.take(outbox.counts, geometry.num_ranks, in_buffer.count_stride);
        arena.take(outbox.weights, geometry.max_tokens, in_buffer.weight_stride);
        arena.take(outbox.rows, outbox.num_rows, geometry.row_stride());
        layout.bytes = arena.end();
        return layout;
    }
};

}  // namespace crossdock
