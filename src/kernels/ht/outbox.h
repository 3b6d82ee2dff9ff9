// SPDX-License-Identifier: Apache-2.0
// The part of an HT arena after its words and rings, in groups of several LSA teams: signals, rings between rail peers
// (ranks of different teams with the same place in their teams), and the outbox, from which rows, weights and routing
// are put. Each slot of a ring exists twice: in the sender's outbox and at the receiver.
#pragma once

#include "kernels/ht/geometry.h"
#include "kernels/reach.h"

namespace crossdock {

// One kind of rings between teams; offsets in every rank's arena. Flags and credits are words that the other end
// raises; this rank keeps the values that it has raised at the other end in words of its own.
struct HtGinRings {
    Region<uint64_t> flags;           // [ends][channels][slots]
    Region<uint64_t> credits;         // the same
    Region<uint64_t> raised_flags;    // the same
    Region<uint64_t> raised_credits;  // the same
    Region<std::byte> packets;        // [ends][channels][ring bytes]
    Region<std::byte> outbox;         // the same
    uint32_t ring_bytes;
};

struct HtOutbox {
    GinWords words;
    Region<uint64_t> tokens;          // [ranks]: put by GIN peers in an update
    Region<uint64_t> totals;          // [ranks]: the same
    Region<uint32_t> rail_masks;      // [ranks][chunks]: put by rail peers
    Region<uint32_t> sent_masks;      // [ranks][chunks]: to be put
    Region<TaggedWord> sent_bitmaps;  // [ranks][tokens][words]: to be put
    HtGinRings rows;                  // ends: teams
    HtGinRings weights;               // ends: ranks; flags, credits and packets also serve LSA peers
    uint64_t bytes;                   // of the whole arena

    // rows_bytes: of a ring of rows.
    static constexpr HtOutbox of(const HtGeometry& geometry, uint32_t teams, uint32_t rows_bytes) {
        HtOutbox outbox{};
        const HtArenaLayout before = HtArenaLayout::of(geometry);
        const uint64_t ranks = geometry.num_ranks;
        const uint64_t chunks = num_chunks(geometry.max_tokens);
        Cursor arena(128, before.bytes);
        outbox.words.lay_out(arena, ranks);
        arena.take(outbox.tokens, ranks);
        arena.take(outbox.totals, ranks);
        arena.take(outbox.rail_masks, ranks * chunks);
        arena.take(outbox.sent_masks, ranks * chunks);
        arena.take(outbox.sent_bitmaps, ranks * geometry.max_tokens * geometry.bitmap_words());
        const uint64_t rail_rings = uint64_t{teams} * geometry.channels;
        HtGinRings& rows = outbox.rows;
        for (Region<uint64_t>* words : {&rows.flags, &rows.credits, &rows.raised_flags, &rows.raised_credits})
            arena.take(*words, rail_rings * kMaxRingSlots);
        arena.take(rows.packets, rail_rings, rows_bytes);
        arena.take(rows.outbox, rail_rings, rows_bytes);
        rows.ring_bytes = rows_bytes;
        HtGinRings& weights = outbox.weights;
        const HtRings& shared = before.offsets.weights;
        weights.flags = shared.flags;
        weights.credits = shared.credits;
        weights.packets = shared.packets;
        weights.ring_bytes = kWeightRingBytes;
        for (Region<uint64_t>* words : {&weights.raised_flags, &weights.raised_credits})
            arena.take(*words, geometry.num_rings() * kMaxRingSlots);
        arena.take(weights.outbox, geometry.num_rings(), kWeightRingBytes);
        outbox.bytes = arena.end();
        return outbox;
    }
};

}  // namespace crossdock
