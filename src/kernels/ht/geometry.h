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

// A row's weights in a packet: room for the most that one rank can have, in stores of 16 bytes.
CROSSDOCK_HOST_DEVICE constexpr uint32_t weights_per_row(uint32_t topk, uint32_t experts_per_rank) {
    return static_cast<uint32_t>(align_up(topk < experts_per_rank ? topk : experts_per_rank, 4));
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

    CROSSDOCK_HOST_DEVICE constexpr uint32_t bitmap_words() const { return (experts_per_rank + 63) / 64; }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t num_rings() const { return uint64_t{num_ranks} * channels; }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t most_rings() const { return uint64_t{num_ranks} * most_channels; }

    // Byte offsets; each is the end of the part before it.
    CROSSDOCK_HOST_DEVICE constexpr uint64_t entered_offset() const { return 0; }  // u64 [2][ranks]
    CROSSDOCK_HOST_DEVICE constexpr uint64_t terms_offset() const {                // TaggedWord [2][ranks]
        return align_up(entered_offset() + 16 * uint64_t{num_ranks}, 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t finished_offset() const {  // u64 [ranks]
        return align_up(terms_offset() + 32 * uint64_t{num_ranks}, 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t barrier_offset() const {  // u64 [2][ranks]
        return align_up(finished_offset() + 8 * uint64_t{num_ranks}, 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t alarms_offset() const {  // u64: failure report; u64 [ranks]: heartbeats
        return align_up(barrier_offset() + 16 * uint64_t{num_ranks}, 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t bases_offset() const {  // TaggedWord [ranks]
        return align_up(alarms_offset() + 8 + 8 * uint64_t{num_ranks}, 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t bitmaps_offset() const {  // TaggedWord [2][ranks][tokens][words]
        return align_up(bases_offset() + 16 * uint64_t{num_ranks}, 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t flags_offset() const {  // u64 [ranks][most channels][slots]
        return align_up(bitmaps_offset() + 32 * uint64_t{num_ranks} * max_tokens * bitmap_words(), 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t credits_offset() const {  // u64 [ranks][most channels][slots]
        return align_up(flags_offset() + 8 * most_rings() * kMaxRingSlots, 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t weight_flags_offset() const {  // u64 [ranks][most channels][slots]
        return align_up(credits_offset() + 8 * most_rings() * kMaxRingSlots, 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t weight_credits_offset() const {  // u64 [ranks][most channels][slots]
        return align_up(weight_flags_offset() + 8 * most_rings() * kMaxRingSlots, 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t done_offset() const {  // u64 [ranks][most channels]
        return align_up(weight_credits_offset() + 8 * most_rings() * kMaxRingSlots, 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t weight_rings_offset() const {  // [ranks][channels][kWeightRingBytes]
        return align_up(done_offset() + 8 * most_rings(), 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t rings_offset() const {  // [ranks][channels][ring bytes]
        return weight_rings_offset() + num_rings() * kWeightRingBytes;
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t arena_bytes() const { return weight_rings_offset() + rings_bytes; }

    // The same memory for operations of so many blocks. Up to `channels` nothing changes, so that each ring stays that
    // of one sender. More blocks have more and smaller rings in the same bytes: every block waits until all ranks have
    // entered before it writes, so nobody reads the rings of the operation before by then.
    constexpr HtGeometry with_channels(uint32_t number) const {
        HtGeometry geometry = *this;
        if (number <= channels) return geometry;
        geometry.channels = number;
        const uint64_t each = rings_bytes / geometry.num_rings();
        const uint64_t room = (each < kWeightRingBytes ? 0 : each - kWeightRingBytes) / 128 * 128;
        geometry.ring_bytes = room < ring_bytes ? static_cast<uint32_t>(room) : ring_bytes;
        return geometry;
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

    static_assert(sizeof(HtRouting) <= 64, "HtRouting lies before the ids");
    CROSSDOCK_HOST_DEVICE constexpr uint64_t ids_offset() const { return 64; }  // i32 [tokens][topk], -1: dropped
    CROSSDOCK_HOST_DEVICE constexpr uint64_t bases_offset() const {  // u32 [ranks]: of this rank's rows at each rank
        return align_up(ids_offset() + 4 * uint64_t{max_tokens} * topk, 16);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t source_tokens_offset() const {  // u32 [ranks]
        return align_up(bases_offset() + 4 * uint64_t{num_ranks}, 16);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t expert_rows_offset() const {  // u32 [local experts]
        return align_up(source_tokens_offset() + 4 * uint64_t{num_ranks}, 16);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t zones_offset() const {  // u32 [local experts + 1]: first slots
        return align_up(expert_rows_offset() + 4 * uint64_t{experts_per_rank}, 16);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t sent_masks_offset() const {  // u32 [ranks][chunks]
        return align_up(zones_offset() + 4 * (uint64_t{experts_per_rank} + 1), 16);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t sent_firsts_offset() const {  // u32 [ranks][chunks + 1]
        return align_up(sent_masks_offset() + 4 * column_entries(), 16);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t masks_offset() const {  // u32 [columns][ranks][chunks]
        return align_up(sent_firsts_offset() + 4 * (column_entries() + num_ranks), 16);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t firsts_offset() const {  // u32 [columns][ranks][chunks]
        return align_up(masks_offset() + 4 * columns() * column_entries(), 16);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t bitmaps_offset() const {  // u64 [ranks][tokens][words]
        return align_up(firsts_offset() + 4 * columns() * column_entries(), 16);
    }
    // Of an elastic dispatch: u8 [rows][topk]
    CROSSDOCK_HOST_DEVICE constexpr uint64_t columns_offset() const {
        return align_up(bitmaps_offset() + 8 * uint64_t{num_ranks} * max_tokens * bitmap_words(), 16);
    }
    // The rest exists only in groups of several teams.
    CROSSDOCK_HOST_DEVICE constexpr uint64_t rail_masks_offset() const {  // u32 [ranks][chunks]
        return align_up(columns_offset() + uint64_t{num_ranks} * max_tokens * topk, 16);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t rail_firsts_offset() const {  // u32 [ranks][chunks + 1]
        return align_up(rail_masks_offset() + 4 * column_entries(), 16);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t crossing_masks_offset() const {  // u32 [2][teams][chunks]
        return align_up(rail_firsts_offset() + 4 * (column_entries() + num_ranks), 16);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t crossing_firsts_offset() const {  // u32 [2][teams][chunks + 1]
        return align_up(crossing_masks_offset() + 8 * uint64_t{teams()} * chunks(), 16);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t bytes() const {
        return teams() == 1 ? rail_masks_offset() : crossing_firsts_offset() + 8 * uint64_t{teams()} * (chunks() + 1);
    }
};

}  // namespace crossdock
