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
    uint64_t flags;           // u64 [ends][channels][slots]
    uint64_t credits;         // the same
    uint64_t raised_flags;    // the same
    uint64_t raised_credits;  // the same
    uint64_t packets;         // [ends][channels][ring bytes]
    uint64_t outbox;          // the same
    uint32_t ring_bytes;
};

struct HtOutbox {
    // Byte offsets inside the arena; each is the end of the part before it.
    uint64_t signals;       // u64 [signals][ranks]
    uint64_t raised;        // u64 [signals][ranks]
    uint64_t traffic;       // u64 [traffic]
    uint64_t tokens;        // u64 [ranks]: put by GIN peers in an update
    uint64_t totals;        // u64 [ranks]: the same
    uint64_t rail_masks;    // u32 [ranks][chunks]: put by rail peers
    uint64_t sent_masks;    // u32 [ranks][chunks]: to be put
    uint64_t sent_bitmaps;  // TaggedWord [ranks][tokens][words]: to be put
    HtGinRings rows;        // ends: teams
    HtGinRings weights;     // ends: ranks; flags, credits and packets also serve LSA peers
    uint64_t bytes;         // of the whole arena

    // rows_bytes: of a ring of rows.
    static constexpr HtOutbox of(const HtGeometry& arena, uint32_t teams, uint32_t rows_bytes) {
        HtOutbox outbox{};
        uint64_t at = arena.arena_bytes();
        const auto take = [&](uint64_t bytes) {
            const uint64_t offset = align_up(at, 128);
            at = offset + bytes;
            return offset;
        };
        const uint64_t ranks = arena.num_ranks;
        const uint64_t chunks = num_chunks(arena.max_tokens);
        outbox.signals = take(8 * kNumSignals * ranks);
        outbox.raised = take(8 * kNumSignals * ranks);
        outbox.traffic = take(uint64_t{8} * kNumTraffic);
        outbox.tokens = take(8 * ranks);
        outbox.totals = take(8 * ranks);
        outbox.rail_masks = take(4 * ranks * chunks);
        outbox.sent_masks = take(4 * ranks * chunks);
        outbox.sent_bitmaps = take(16 * ranks * arena.max_tokens * arena.bitmap_words());
        const uint64_t rail_rings = uint64_t{teams} * arena.channels;
        const uint64_t rail_words = 8 * rail_rings * kMaxRingSlots;
        outbox.rows.flags = take(rail_words);
        outbox.rows.credits = take(rail_words);
        outbox.rows.raised_flags = take(rail_words);
        outbox.rows.raised_credits = take(rail_words);
        outbox.rows.packets = take(rail_rings * rows_bytes);
        outbox.rows.outbox = take(rail_rings * rows_bytes);
        outbox.rows.ring_bytes = rows_bytes;
        const uint64_t weight_words = 8 * arena.num_rings() * kMaxRingSlots;
        outbox.weights.flags = arena.weight_flags_offset();
        outbox.weights.credits = arena.weight_credits_offset();
        outbox.weights.raised_flags = take(weight_words);
        outbox.weights.raised_credits = take(weight_words);
        outbox.weights.packets = arena.weight_rings_offset();
        outbox.weights.outbox = take(arena.num_rings() * kWeightRingBytes);
        outbox.weights.ring_bytes = kWeightRingBytes;
        outbox.bytes = at;
        return outbox;
    }
};

}  // namespace crossdock
