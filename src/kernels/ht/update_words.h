// SPDX-License-Identifier: Apache-2.0
// High-throughput update: its words in the arenas, and what its blocks share.
#pragma once

#include "kernels/ht/operation.h"

namespace crossdock {
namespace {

CROSSDOCK_DEVICE TaggedWord* base_word(const HtCommon& c, int owner, int lane) {
    return reinterpret_cast<TaggedWord*>(c.peers.at(owner, c.offsets.bases)) + lane;
}
CROSSDOCK_DEVICE uint64_t bitmap_offset(const HtCommon& c, int rank, uint32_t token) {
    return sizeof(TaggedWord) * (static_cast<uint64_t>(rank) * c.arena.max_tokens + token) * c.tables.words;
}
CROSSDOCK_DEVICE TaggedWord* bitmap_words(const HtCommon& c, int owner, int writer, uint32_t token) {
    return reinterpret_cast<TaggedWord*>(c.peers.at(owner, c.offsets.bitmaps + bitmap_offset(c, writer, token)));
}
// Where the words for a peer are written: in its arena, or in the outbox.
CROSSDOCK_DEVICE TaggedWord* outgoing_bitmap_words(const HtCommon& c, int peer, uint32_t token) {
    if (is_remote(c.reach, peer))
        return in_own_arena<TaggedWord>(c, c.outbox.sent_bitmaps + bitmap_offset(c, peer, token));
    return bitmap_words(c, peer, c.rank, token);
}

// Where a rank's rows begin at a receiver, and what the receiver gets in all.
CROSSDOCK_DEVICE uint64_t pack_base(uint32_t base, uint32_t total) { return uint64_t{total} << 32 | base; }

// In a block's shared memory, behind its head.
struct UpdateShared {
    uint32_t* peers;   // [ranks] PeerState
    uint32_t* tokens;  // [ranks] of each source

    CROSSDOCK_HOST_DEVICE static constexpr uint32_t bytes(uint32_t num_ranks) {
        return static_cast<uint32_t>(align_up(sizeof(HtBlockHead), 16) + 8 * uint64_t{num_ranks});
    }
    CROSSDOCK_DEVICE static UpdateShared of(const Ctx& ctx, const HtCommon& c) {
        uint32_t* words = reinterpret_cast<uint32_t*>(ctx.shared_memory() + align_up(sizeof(HtBlockHead), 16));
        return {words, words + c.arena.num_ranks};
    }
};

CROSSDOCK_DEVICE uint32_t warp_of_grid(const Ctx& ctx) {
    return static_cast<uint32_t>(ctx.warp_idx() * ctx.num_blocks() + ctx.block_idx());
}
CROSSDOCK_DEVICE uint32_t warps_of_grid(const Ctx& ctx) {
    return static_cast<uint32_t>(ctx.num_warps() * ctx.num_blocks());
}

// Those of a source's tokens that are in a chunk, as a mask.
CROSSDOCK_DEVICE uint32_t tokens_of_chunk(uint32_t tokens, uint32_t chunk) {
    const uint32_t num = tokens - chunk * kChunkTokens;
    return num < kChunkTokens ? (1u << num) - 1 : ~0u;
}

// Of a chunk: where its mask lies, and whether that has any meaning.
struct Entry {
    uint32_t at;
    bool exists;
};

// The entries' firsts become the ones of the masks of all entries before; returns all ones. A lane takes several at
// once, whose masks come together. One warp.
template <typename EntryOf>
CROSSDOCK_DEVICE uint32_t number_entries(const Ctx& ctx, const uint32_t* masks, uint32_t* firsts, uint32_t entries,
                                         EntryOf entry_of) {
    constexpr uint32_t kRun = 8;
    uint32_t before = 0;
    CROSSDOCK_ROLLED
    for (uint32_t run = 0; run < entries; run += kLanes * kRun) {
        const uint32_t first = run + static_cast<uint32_t>(ctx.lane()) * kRun;
        uint32_t ones[kRun];
        uint32_t sum = 0;
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kRun; ++i) {
            const Entry entry = first + i < entries ? entry_of(first + i) : Entry{};
            ones[i] = entry.exists ? masks[entry.at] : 0;
        }
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kRun; ++i) {
            ones[i] = static_cast<uint32_t>(number_of_ones(ones[i]));
            sum += ones[i];
        }
        uint32_t number = before + static_cast<uint32_t>(ctx.warp_sum_before(static_cast<int>(sum)));
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kRun; ++i) {
            if (first + i < entries) firsts[entry_of(first + i).at] = number;
            number += ones[i];
        }
        before += static_cast<uint32_t>(ctx.warp_sum(static_cast<int>(sum)));
    }
    return before;
}

// The same of a row of chunks; behind the last of firsts comes the total.
CROSSDOCK_DEVICE void number_chunks(const Ctx& ctx, const uint32_t* masks, uint32_t* firsts, uint32_t chunks) {
    const uint32_t total = number_entries(ctx, masks, firsts, chunks, [](uint32_t i) { return Entry{i, true}; });
    if (is_leader(ctx)) firsts[chunks] = total;
}

}  // namespace
}  // namespace crossdock
