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
    Region<uint64_t> counts;     // [ranks][1 + local experts]
    Region<TaggedWord> headers;  // [ranks][tokens][1 + topk], as in the peer's buffer
    Region<TaggedWord> weights;  // [tokens][weight words]
    Region<std::byte> rows;      // [num_rows]
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
        // As many rows as return here, if all ranks send the same number.
        const uint64_t cells = geometry.num_cells();
        outbox.num_rows = static_cast<uint32_t>(cells > kFewestOutboxRows ? cells : kFewestOutboxRows);
        Cursor arena(128, before.bytes);
        layout.words.lay_out(arena, geometry.num_ranks);
        arena.take(outbox.counts, geometry.num_ranks, in_buffer.count_stride);
        arena.take(outbox.headers, geometry.num_slots(), in_buffer.header_stride);
        arena.take(outbox.weights, geometry.max_tokens, in_buffer.weight_stride);
        arena.take(outbox.rows, outbox.num_rows, geometry.row_stride());
        layout.bytes = arena.end();
        return layout;
    }
};

}  // namespace crossdock
