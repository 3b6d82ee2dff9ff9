// SPDX-License-Identifier: Apache-2.0
// High-throughput update: its words in the arenas, and what its blocks share.
#pragma once

#include "kernels/ht/operation.h"

namespace crossdock {
namespace {

CROSSDOCK_DEVICE TaggedWord* base_word(const HtCommon& c, uint32_t owner, uint32_t route) {
    return c.peers.at(owner, c.offsets.bases) + route;
}
// Among the bitmaps of one operation.
CROSSDOCK_DEVICE uint64_t bitmap_offset(const HtCommon& c, uint32_t rank, uint32_t token) {
    return sizeof(TaggedWord) * (uint64_t{rank} * c.arena.max_tokens + token) * c.tables.words;
}
// Of a writer's token in its peers' arenas. Operations use two halves in turn, as with the entered words.
CROSSDOCK_DEVICE uint64_t bitmap_words_offset(const HtCommon& c, const Operation& operation, uint32_t writer,
                                              uint32_t token) {
    const uint32_t half = static_cast<uint32_t>(operation.epoch % 2) * c.arena.num_ranks;
    return c.offsets.bitmaps.offset + bitmap_offset(c, half + writer, token);
}
CROSSDOCK_DEVICE TaggedWord* bitmap_words(const HtCommon& c, const Operation& operation, uint32_t owner,
                                          uint32_t writer, uint32_t token) {
    return reinterpret_cast<TaggedWord*>(c.peers.at(owner, bitmap_words_offset(c, operation, writer, token)));
}
// Where the words for a peer are written: in its arena, or in the outbox.
CROSSDOCK_DEVICE TaggedWord* outgoing_bitmap_words(const HtCommon& c, const Operation& operation, uint32_t peer,
                                                   uint32_t token) {
    if (is_remote(c.reach, peer))
        return in_own_arena<TaggedWord>(c, c.outbox.sent_bitmaps.offset + bitmap_offset(c, peer, token));
    return bitmap_words(c, operation, peer, c.rank, token);
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

CROSSDOCK_DEVICE uint32_t warp_of_grid(const Ctx& ctx) { return ctx.warp_idx() * ctx.num_blocks() + ctx.block_idx(); }
CROSSDOCK_DEVICE uint32_t warps_of_grid(const Ctx& ctx) { return ctx.num_warps() * ctx.num_blocks(); }

// Those of a source's tokens that are in a chunk, as a mask.
CROSSDOCK_DEVICE uint32_t tokens_of_chunk(uint32_t tokens, uint32_t chunk) {
    const uint32_t num = tokens - chunk * kChunkTokens;
    return num < kChunkTokens ? (1u << num) - 1 : ~0u;
}

// Iterates over the chunks of several sources, `chunks` of each, in order. Lanes are at neighbouring chunks.
class ChunkCursor {
  public:
    CROSSDOCK_DEVICE ChunkCursor(const Ctx& ctx, uint32_t chunks)
        : source_(ctx.lane() / chunks),
          chunk_(ctx.lane() % chunks),
          chunks_(chunks),
          source_step_(kLanes / chunks),
          chunk_step_(kLanes % chunks) {}

    CROSSDOCK_DEVICE uint32_t source() const { return source_; }
    CROSSDOCK_DEVICE uint32_t chunk() const { return chunk_; }
    // Moves on by kLanes chunks.
    CROSSDOCK_DEVICE void advance() {
        source_ += source_step_;
        chunk_ += chunk_step_;
        if (chunk_ < chunks_) return;
        chunk_ -= chunks_;
        ++source_;
    }

  private:
    uint32_t source_;
    uint32_t chunk_;
    uint32_t chunks_;
    uint32_t source_step_;
    uint32_t chunk_step_;
};

// Of a chunk: where its mask lies, and whether that has any meaning.
struct Entry {
    static constexpr uint32_t kNowhere = ~uint32_t{0};
    uint32_t at = kNowhere;
    bool exists = false;
};

// Writes exclusive prefix sums of the masks' ones to `firsts`, in the order (source, chunk), and returns the total.
// entry_of(source, chunk) tells where an entry is. One warp, which loads kRows masks per lane at once.
template <typename EntryOf>
CROSSDOCK_DEVICE uint32_t number_entries(const Ctx& ctx, const uint32_t* masks, uint32_t* firsts, uint32_t sources,
                                         uint32_t chunks, EntryOf entry_of) {
    constexpr uint32_t kRows = 8;
    constexpr uint32_t kHalfBits = 16;  // two rows are added up in one word
    static_assert(kLanes * kChunkTokens < 1u << kHalfBits);
    const uint32_t entries = sources * chunks;
    uint32_t before = 0;
    ChunkCursor cursor(ctx, chunks);
    CROSSDOCK_ROLLED
    for (uint32_t base = 0; base < entries; base += kLanes * kRows) {
        uint32_t places[kRows];
        uint32_t ones[kRows];
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kRows; ++i, cursor.advance()) {
            const Entry entry = cursor.source() < sources ? entry_of(cursor.source(), cursor.chunk()) : Entry{};
            places[i] = entry.at;
            ones[i] = entry.exists ? masks[entry.at] : 0;
        }
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kRows; i += 2) {
            const uint32_t sums = number_of_ones(ones[i]) | number_of_ones(ones[i + 1]) << kHalfBits;
            const uint32_t sums_before = ctx.warp_sum_before(sums);
            const uint32_t sums_of_rows = ctx.warp_sum(sums);
            CROSSDOCK_UNROLL
            for (uint32_t row = i; row < i + 2; ++row) {
                const uint32_t shift = (row - i) * kHalfBits;
                if (places[row] != Entry::kNowhere)
                    firsts[places[row]] = before + (sums_before >> shift) % (1u << kHalfBits);
                before += (sums_of_rows >> shift) % (1u << kHalfBits);
            }
        }
    }
    return before;
}

// The same of a row of chunks; behind the last of firsts comes the total.
CROSSDOCK_DEVICE void number_chunks(const Ctx& ctx, const uint32_t* masks, uint32_t* firsts, uint32_t chunks) {
    const auto entry_of = [](uint32_t, uint32_t chunk) { return Entry{chunk, true}; };
    const uint32_t total = chunks > 0 ? number_entries(ctx, masks, firsts, 1, chunks, entry_of) : 0;
    if (is_leader(ctx)) firsts[chunks] = total;
}

}  // namespace
}  // namespace crossdock
