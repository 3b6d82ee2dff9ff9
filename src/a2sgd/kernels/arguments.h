// SPDX-License-Identifier: Apache-2.0
// Common to A2SGD's kernels: the layout of the ranks' means in symmetric memory, a rank's state, and the arguments, by
// value. crossdock/a2sgd.h describes the algorithm.
//
// A step is three kernels. Sums: each block sums segments of the gradient; the last block adds the partial sums and
// sends this rank's means to every rank. Means: one block waits for all ranks' means and computes how far entries move.
// Apply: moves them. Only the second kernel waits, so the GPU is otherwise free, and whether anything is applied is
// decided once.
#pragma once

#include "a2sgd/device/sign_sums.h"
#include "kernels/geometry.h"
#include "kernels/reach.h"
#include "kernels/wait_steps.h"

namespace crossdock {

// A run of one piece's entries. The host divides pieces into chunks.
struct A2sgdChunk {
    std::byte* entries;
    uint32_t count;  // 1..kSignChunk
    DType dtype;
    uint32_t piece;
    uint32_t reserved;
};

inline constexpr uint32_t kChunksOfSegment = 8;  // a segment is one block's turn

inline constexpr uint32_t kAllFinite = UINT32_MAX;

// Sums of a segment, of a column of segments, or of all.
struct A2sgdSums {
    double positive;
    double negative;
    uint64_t num_positive;
    uint32_t nonfinite_piece;  // the first one; kAllFinite: none
    uint32_t reserved;
};

struct A2sgdReport {  // host-visible; written by the means kernel
    uint64_t step;
    uint64_t num_positive;
    float own[2];   // a, b
    float mean[2];  // A, B
    uint32_t num_nonfinite_ranks;
    int32_t nonfinite_rank;
    int32_t nonfinite_piece;
    uint32_t skipped;
};

// A rank's state, in device memory. Kernels of one rank run one after the other, so blocks share only `blocks_done`.
struct A2sgdState {
    uint64_t step;  // the latest whose means were sent; advances on the device, so that graph replays count
    A2sgdSums sums;
    uint32_t blocks_done;
    uint32_t applies;  // 0 if the step is skipped, or a rank was lost
    float up;          // added to entries that are not negative
    float down;        // added to the others
};

// The symmetric memory. A rank's means are a tagged word: both as fp32; the tag has the step, then 0 or 1 + the first
// piece that is not finite. Words of two steps are used in turn: a rank sends those of a step after it has finished the
// step before, for which it has seen all ranks' means of that step; so all have read those of two steps ago.
struct A2sgdArena {
    uint32_t num_ranks;

    CROSSDOCK_HOST_DEVICE constexpr uint64_t word_offset(uint64_t step, uint32_t writer) const {
        return 16 * (step % 2 * num_ranks + writer);
    }
    // Behind the means of two steps. Returns the bytes of all.
    constexpr uint64_t lay_out(GinWords& words) const {
        Cursor piece(128, 2 * sizeof(TaggedWord) * num_ranks);
        words.lay_out(piece, num_ranks);
        return piece.end();
    }
};

inline constexpr uint32_t kMostPieces = static_cast<uint32_t>(kMaxPayload) - 1;

struct A2sgdArgs {
    A2sgdArena arena;
    PeerMap peers;
    Reach reach;
    uint32_t rank;
    WaitScope scope;
    A2sgdState* state;
    A2sgdReport* report;
    const A2sgdChunk* chunks;
    uint64_t num_chunks;
    A2sgdSums* partials;  // [segments]
    uint64_t num_segments;
    uint64_t count;  // entries of all chunks
    bool sums_in_fp64;
    bool skips_nonfinite;
};

// A block's shared memory.
struct A2sgdSumsShared {
    A2sgdSums chunks[2][kChunksOfSegment];  // of the current segment and of the previous one
    A2sgdSums columns[kSignColumns];
    uint32_t is_last;
    uint64_t payload;
    uint64_t tag;
};
CROSSDOCK_HOST_DEVICE constexpr uint64_t a2sgd_means_shared_bytes(uint32_t num_ranks) {
    return uint64_t{16} * num_ranks + 16;
}

namespace {

CROSSDOCK_DEVICE TaggedWord* means_word(const A2sgdArgs& args, uint32_t owner, uint64_t step, uint32_t writer) {
    return reinterpret_cast<TaggedWord*>(args.peers.at(owner, args.arena.word_offset(step, writer)));
}

}  // namespace
}  // namespace crossdock
