// SPDX-License-Identifier: Apache-2.0
// The memory layouts of HT: words, rings and bitmaps. One description for hosts and kernels. docs/protocol.md draws it.
//
// The tokens of a rank are numbered in chunks of 32, so that a 32-bit mask says which tokens of a chunk go to a rank,
// and a row's number is the chunk's first number plus a count of ones. Block b of every rank is channel b: it moves a
// contiguous share of each rank's tokens, and of the weights of its chunks. A ring (sender, receiver, channel) carries
// the packets of that channel.
#pragma once

#include "kernels/geometry.h"

namespace crossdock {

inline constexpr uint32_t kChunkTokens = 32;
inline constexpr uint32_t kMaxRingSlots = 64;
inline constexpr uint32_t kWeightRingBytes = 16384;
static_assert(kChunkTokens == 32, "a chunk's mask is a uint32_t, a bit per token");
static_assert(2 * kChunkTokens * kMaxTopk * sizeof(float) <= kWeightRingBytes,
              "a ring of weights holds those of two chunks at the largest top-k");

CROSSDOCK_HOST_DEVICE constexpr uint32_t num_chunks(uint32_t tokens) {
    return (tokens + kChunkTokens - 1) / kChunkTokens;
}

// The most rows of a token that so many experts can have.
CROSSDOCK_HOST_DEVICE constexpr uint32_t rows_of_token(uint32_t topk, uint32_t experts) {
    return topk < experts ? topk : experts;
}
// Behind the rows of a packet of HtWire::kChoices: the index of the last.
inline constexpr uint32_t kRowCountBytes = 16;

// A row's weights in a packet: room for the most that one rank can have, in stores of 16 bytes.
CROSSDOCK_HOST_DEVICE constexpr uint32_t weights_per_row(uint32_t topk, uint32_t experts_per_rank) {
    return static_cast<uint32_t>(align_up(rows_of_token(topk, experts_per_rank), 4));
}

// What an elastic dispatch sends of a token's routing: ids and weights by column (elastic_words.h).
CROSSDOCK_HOST_DEVICE constexpr uint64_t routing_bytes(uint32_t topk) { return align_up(8 * uint64_t{topk}, 16); }

// Symmetric memory: words that peers write, received routing, and the rings. Operations may divide one arena
// differently (with_channels), but words only ever lie where other geometries have words of the same kind.
struct HtGeometry {
    uint32_t num_ranks;
    uint32_t experts_per_rank;
    uint32_t max_tokens;     // a rank and operation
    uint32_t channels;       // most blocks of an operation
    uint32_t ring_bytes;     // of one ring
    uint32_t most_channels;  // of any operation: words have room for so many
    uint64_t rings_bytes;    // of all rings
    bool rings_are_fixed;    // each stays that of one sender

    CROSSDOCK_HOST_DEVICE constexpr uint32_t bitmap_words() const { return (experts_per_rank + 63) / 64; }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t num_rings() const { return uint64_t{num_ranks} * channels; }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t most_rings() const { return uint64_t{num_ranks} * most_channels; }

    // The same memory for operations of so many blocks: fewer blocks have fewer and larger rings in the same bytes,
    // more blocks more and smaller ones. Every block waits until all ranks have entered before it writes, so nobody
    // reads the rings of the operation before by then.
    constexpr HtGeometry with_channels(uint32_t number) const {
        constexpr uint64_t kMostRingBytes = INT32_MAX / 128 * 128;
        HtGeometry geometry = *this;
        if (number == channels || rings_are_fixed) return geometry;
        geometry.channels = number;
        const uint64_t each = rings_bytes / geometry.num_rings();
        const uint64_t room = (each < kWeightRingBytes ? 0 : each - kWeightRingBytes) / 128 * 128;
        geometry.ring_bytes = static_cast<uint32_t>(room < kMostRingBytes ? room : kMostRingBytes);
        return geometry;
    }
};

// One kind of rings: where they are in every arena.
struct HtRings {
    Region<uint64_t> flags;     // [ranks][most channels][slots]
    Region<uint64_t> credits;   // [ranks][most channels][slots]
    Region<std::byte> packets;  // [ranks][channels][ring bytes]
    uint32_t ring_bytes;
    uint32_t kind;  // 0: rows, 1: weights
};

// Where everything is in every rank's arena.
struct HtOffsets {
    Region<uint64_t> entered;    // [2][ranks]
    Region<TaggedWord> terms;    // [2][ranks]
    Region<uint64_t> finished;   // [ranks]
    Region<uint64_t> alarms;     // failure report; [ranks]: heartbeats
    Region<TaggedWord> bases;    // [ranks]
    Region<TaggedWord> bitmaps;  // [2][ranks][tokens][words]
    Region<uint64_t> done;       // [ranks][most channels]
    HtRings rows;
    HtRings weights;
};

struct HtArenaLayout {
    HtOffsets offsets;
    Region<uint64_t> barrier;  // [2][ranks]
    uint64_t bytes;

    static constexpr HtArenaLayout of(const HtGeometry& geometry) {
        HtArenaLayout layout{};
        HtOffsets& parts = layout.offsets;
        const uint64_t ranks = geometry.num_ranks;
        const uint64_t ring_words = geometry.most_rings() * kMaxRingSlots;
        Cursor arena(128);
        arena.take(parts.entered, 2 * ranks);
        arena.take(parts.terms, 2 * ranks);
        arena.take(parts.finished, ranks);
        arena.take(layout.barrier, 2 * ranks);
        arena.take(parts.alarms, 1 + ranks);
        arena.take(parts.bases, ranks);
        arena.take(parts.bitmaps, 2 * ranks * geometry.max_tokens * geometry.bitmap_words());
        arena.take(parts.rows.flags, ring_words);
        arena.take(parts.rows.credits, ring_words);
        arena.take(parts.weights.flags, ring_words);
        arena.take(parts.weights.credits, ring_words);
        arena.take(parts.done, geometry.most_rings());
        arena.take(parts.weights.packets, geometry.num_rings(), kWeightRingBytes);
        arena.take(parts.rows.packets, geometry.num_rings(), geometry.ring_bytes);
        parts.rows.ring_bytes = geometry.ring_bytes;
        parts.rows.kind = 0;
        parts.weights.ring_bytes = kWeightRingBytes;
        parts.weights.kind = 1;
        // Not where the last ring ends: other geometries may divide the same bytes differently.
        layout.bytes = parts.weights.packets.offset + geometry.rings_bytes;
        return layout;
    }
};

// The maker of a routing: only a handle with the same maker may read it.
struct HtRoutingMaker {
    uint64_t group;  // unique in the process; 0: none
    uint32_t layout;
    uint32_t topk;  // that the memory is laid out for
    friend CROSSDOCK_HOST_DEVICE constexpr bool operator==(const HtRoutingMaker& a, const HtRoutingMaker& b) {
        return a.group == b.group && a.layout == b.layout && a.topk == b.topk;
    }
};

// The result of an Update, in the handle's memory: everything that dispatch and combine need, so that another handle
// with the same memory can use it.
struct HtRouting {
    uint64_t magic;       // kHtRoutingMagic
    uint32_t topk;        // of the routing
    uint32_t alignment;   // of experts' zones
    uint32_t num_tokens;  // of this rank
    uint32_t num_rows;    // received, one for each (source, token); dropped ones included
    uint32_t total;       // rows (flat) or padded slots (expert-major), dropped ones included
    uint32_t cleans;      // of the group's masks, before it
    uint64_t dropped;     // pairs of an own token and a masked rank to which it should have gone
    HtRoutingMaker maker;
    uint64_t update;  // the number of the operation that made it: the same on every rank
};
inline constexpr uint64_t kHtRoutingMagic = 0x474E4954554F5254;

struct HtHandleGeometry {
    uint32_t num_ranks;
    uint32_t lsa_team_size;  // of an LSA team
    uint32_t experts_per_rank;
    uint32_t max_tokens;
    uint32_t topk;

    CROSSDOCK_HOST_DEVICE constexpr uint32_t chunks() const { return num_chunks(max_tokens); }
    // A column: one entry per chunk of each source. Column 0 counts rows, column 1 + e those for local expert e.
    CROSSDOCK_HOST_DEVICE constexpr uint64_t column_entries() const { return uint64_t{num_ranks} * chunks(); }
    CROSSDOCK_HOST_DEVICE constexpr uint32_t columns() const { return 1 + experts_per_rank; }
    CROSSDOCK_HOST_DEVICE constexpr uint32_t bitmap_words() const { return (experts_per_rank + 63) / 64; }
    CROSSDOCK_HOST_DEVICE constexpr uint32_t teams() const { return num_ranks / lsa_team_size; }
};

}  // namespace crossdock
