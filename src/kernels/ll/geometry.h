// SPDX-License-Identifier: Apache-2.0
// The low-latency buffer: one description of who has which slot, cell and word, used by hosts and kernels alike.
// docs/protocol.md draws it.
//
// Every rank holds one arena of kNumBuffers buffers. An operation (dispatch or combine) uses one buffer, the same on
// every rank:
//   dispatch: slot (source rank, i) of the target holds the i-th token that this source sends there: row, scales,
//   header; combine:  cell (token, j) of the home rank holds the j-th row that comes back for its token.
// Every word that announces something carries the operation's epoch, so nothing is ever reset.
#pragma once

#include "device/platform.h"

namespace crossdock {

inline constexpr int kNumBuffers =
    4;  // two for operations that follow each other, two for pending send_only operations
inline constexpr int kMaxPendingSplits = kNumBuffers - 1;
inline constexpr int kMaxTopk = 64;
inline constexpr uint64_t kPayloadBits = 24;  // of an announcing word; the other 40 hold the epoch
inline constexpr uint64_t kMaxPayload = (uint64_t{1} << kPayloadBits) - 1;

CROSSDOCK_HOST_DEVICE constexpr uint64_t align_up(uint64_t value, uint64_t alignment) {
    return (value + alignment - 1) / alignment * alignment;
}

// An announcing word: a reader that sees this epoch sees this payload, and a word of an earlier operation can never
// look new.
CROSSDOCK_HOST_DEVICE constexpr uint64_t pack_word(uint64_t epoch, uint64_t payload) {
    return epoch << kPayloadBits | payload;
}
CROSSDOCK_HOST_DEVICE constexpr uint64_t word_epoch(uint64_t word) { return word >> kPayloadBits; }
CROSSDOCK_HOST_DEVICE constexpr uint64_t word_payload(uint64_t word) { return word & kMaxPayload; }

// Follows every dispatched row: which token it is and where its choices go. Ids are global expert ids, -1 where
// dropped.
struct RowHeader {
    uint32_t token_idx;
    uint32_t direct;  // bits of DirectPart: what the source wrote straight into the receiver's tensors
    uint32_t reserved[2];
    // int32_t expert_ids[topk]
    // expert-major: int32_t positions[topk], the choice's place among this source's rows for that expert
    // rank-major:   float weights[topk]
};

enum DirectPart : uint32_t { kDirectTokens = 1, kDirectScales = 2 };

CROSSDOCK_HOST_DEVICE constexpr uint32_t row_header_bytes(uint32_t topk) {
    return static_cast<uint32_t>(align_up(sizeof(RowHeader) + uint64_t{8} * topk, 16));
}

// What the arena was made for. Handles with fewer choices use the same strides.
struct LlGeometry {
    uint32_t num_ranks;
    uint32_t num_experts;
    uint32_t max_tokens;       // a rank and operation
    uint32_t row_capacity;     // bytes of a token row with its scales, a multiple of 16
    uint32_t topk;             // the largest
    uint32_t cells_per_token;  // rows that may come back for one token

    CROSSDOCK_HOST_DEVICE constexpr uint32_t experts_per_rank() const { return num_experts / num_ranks; }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t slot_bytes() const {
        return align_up(uint64_t{row_capacity} + row_header_bytes(topk), 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t cell_bytes() const { return align_up(row_capacity, 128); }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t num_slots() const { return uint64_t{num_ranks} * max_tokens; }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t num_cells() const { return uint64_t{max_tokens} * cells_per_token; }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t count_words_per_source() const { return 1 + experts_per_rank(); }

    // Byte offsets inside a buffer; each is the end of the part before it.
    CROSSDOCK_HOST_DEVICE constexpr uint64_t entries_offset() const { return 0; }  // u64 [ranks]
    CROSSDOCK_HOST_DEVICE constexpr uint64_t counts_offset() const {               // u64 [ranks][1 + local experts]
        return align_up(entries_offset() + 8 * uint64_t{num_ranks}, 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t row_flags_offset() const {  // u64 [max(slots, cells)]
        return align_up(counts_offset() + 8 * num_ranks * count_words_per_source(), 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t weight_flags_offset() const {  // u64 [ranks]
        return align_up(row_flags_offset() + 8 * (num_slots() > num_cells() ? num_slots() : num_cells()), 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t weights_offset() const {  // f32 [ranks][tokens][topk]
        return align_up(weight_flags_offset() + 8 * uint64_t{num_ranks}, 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t rows_offset() const {
        return align_up(weights_offset() + uint64_t{4} * num_ranks * max_tokens * topk, 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t buffer_bytes() const {
        const uint64_t slots = num_slots() * slot_bytes();
        const uint64_t cells = num_cells() * cell_bytes();
        return align_up(rows_offset() + (slots > cells ? slots : cells), 128);
    }

    // Byte offsets inside the arena.
    CROSSDOCK_HOST_DEVICE constexpr uint64_t credits_offset() const { return 0; }  // u64 [buffers][ranks]
    CROSSDOCK_HOST_DEVICE constexpr uint64_t barrier_offset() const {              // u64 [2][ranks]
        return align_up(credits_offset() + uint64_t{8} * kNumBuffers * num_ranks, 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t buffer_offset(int buffer) const {
        return align_up(barrier_offset() + uint64_t{16} * num_ranks, 128) +
               static_cast<uint64_t>(buffer) * buffer_bytes();
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t arena_bytes() const { return buffer_offset(kNumBuffers); }
};

// A handle's own memory: what a combine must know of the dispatch before it.
struct LlHandleGeometry {
    uint32_t num_ranks;
    uint32_t experts_per_rank;
    uint32_t max_tokens;
    uint32_t topk;

    CROSSDOCK_HOST_DEVICE constexpr uint64_t pending_offset() const { return 0; }      // LlPending
    CROSSDOCK_HOST_DEVICE constexpr uint64_t row_counts_offset() const { return 64; }  // i32 [ranks]
    CROSSDOCK_HOST_DEVICE constexpr uint64_t first_rows_offset() const {               // i32 [ranks][local experts]
        return align_up(row_counts_offset() + uint64_t{4} * num_ranks, 16);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t headers_offset() const {  // RowHeader [ranks][tokens]
        return align_up(first_rows_offset() + uint64_t{4} * num_ranks * experts_per_rank, 16);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t bytes() const {
        return headers_offset() + uint64_t{num_ranks} * max_tokens * row_header_bytes(topk);
    }
};

// The handle's send_only operation that waits for its receive half.
struct LlPending {
    uint64_t epoch;
    uint32_t buffer;
};

}  // namespace crossdock
