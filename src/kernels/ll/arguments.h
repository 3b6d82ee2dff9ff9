// SPDX-License-Identifier: Apache-2.0
// What the low-latency kernels receive, by value. Pointers are device memory of this rank unless said otherwise.
#pragma once

#include "device/numeric.h"
#include "device/peer_map.h"
#include "kernels/agreement.h"
#include "kernels/ll/geometry.h"
#include "kernels/ll/outbox.h"
#include "kernels/ll/recipes.h"
#include "kernels/ll/steps.h"
#include "kernels/wait_steps.h"

namespace crossdock {

// kCancel: with kReceiveHalf, gives the buffer of a pending operation back without reading it.
enum LlHalves : uint32_t { kSendHalf = 1, kReceiveHalf = 2, kCancel = 4 };

// Advances by one operation a kernel, on the device, so that graph replays count too. All ranks run the same operations
// in the same order, so epoch and buffer agree everywhere without a word exchanged.
//
// Every block reads the clock and then takes a ticket. Whoever takes the last ticket of a grid writes the next
// operation's clock: by then nobody needs this one any more.
struct LlArenaState {
    uint64_t clock;  // LlClock
    // free_from[epoch % 2][buffer]: a peer that has entered this epoch has read all that was in that buffer. Read by
    // the operation of that epoch, written by the one before it.
    uint64_t free_from[2][kNumBuffers];
    uint32_t tickets;
    uint32_t blocks_done;  // counts only where masks are on
    uint32_t blocks_put;   // counts only in groups of several LSA teams
};

// In one word, from the upper end: epoch, latest buffer, held buffers.
struct LlClock {
    uint64_t epoch;
    uint32_t latest_buffer;  // of the operation before
    uint32_t held_buffers;   // bit b: held by a pending send_only operation

    CROSSDOCK_HOST_DEVICE static constexpr LlClock of(uint64_t word) {
        return {word >> kEpochShift,
                static_cast<uint32_t>(word >> kLatestBufferShift) & ((1u << kLatestBufferBits) - 1),
                static_cast<uint32_t>(word) & ((1u << kNumBuffers) - 1)};
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t word() const {
        return epoch << kEpochShift | uint64_t{latest_buffer} << kLatestBufferShift | held_buffers;
    }

    static constexpr uint32_t kLatestBufferBits = bits_below(kNumBuffers);
    static constexpr uint32_t kLatestBufferShift = kNumBuffers;
    static constexpr uint32_t kEpochShift = kLatestBufferShift + kLatestBufferBits;
};
static_assert(64 - LlClock::kEpochShift >= kEpochBits, "the clock counts epochs as far as announcing words hold them");
static_assert(kNumBuffers < 32, "a bit of 32 per buffer");

// The form of a rank's own rows, where it is known before the launch.
enum class LlForm : uint32_t { kEither, kLl128, kPlain };

template <typename Scope>
struct LlCommonOf {
    // What kernels for all cases know; kernels for one case (kernels/ll/variants.h) know more.
    static constexpr uint32_t kMostTopk = kMaxTopk;
    static constexpr LlForm kForm = LlForm::kEither;
    static constexpr bool kFewTokens = false;  // no more than a block has threads

    LlGeometry arena;
    LlOffsets offsets;  // of arena
    PeerMap peers;      // the arenas of the LSA team's ranks
    uint32_t rank;
    uint32_t halves;
    LlArenaState* state;
    LlHandleOffsets handle;
    std::byte* handle_memory;
    Scope scope;

    bool expert_major;
    bool ids_are_64_bit;
    bool traps_overflow;  // rows of an expert past its capacity, which only repeated ids make, fail the group
    uint32_t topk;        // this handle's
    uint32_t num_tokens;
    const void* topk_idx;          // [tokens][topk] global expert ids
    uint32_t rank_of_expert_mult;  // id * this >> kRankOfExpertShift is the expert's rank

    // Where both halves run, some blocks may send while others receive, or all do both, one after the other.
    uint32_t send_blocks;     // the first ones
    uint32_t receive_blocks;  // the last ones
    uint32_t tokens_per_block;
    uint32_t log2_blocks_per_token;  // of LL128 rows
    uint32_t ll128_tokens;           // with at most that many tokens, rows are LL128 rows
    LlWarpLayout warp_layout;

    // Groups of several LSA teams.
    Reach reach;
    LlOutbox outbox;

    // What this rank enters the operation with.
    void set(Term term, uint64_t value) { scope.terms = Terms{scope.terms}.with(term, value).word; }
    void set_folded(Term term, uint64_t value) { scope.terms = Terms{scope.terms}.with_folded(term, value).word; }
};
using LlCommon = LlCommonOf<WaitScope>;

inline constexpr uint32_t kRankOfExpertShift = 31;
static_assert(kRankOfExpertShift < 32, "the factor for one expert per rank, 2^shift, is a uint32_t");

template <typename Common>
struct LlDispatchArgsOf {
    static constexpr bool kOneBatch = false;  // a block's tokens are under way at once, in whole rows

    Common common;
    LlDispatchShared shared;
    LlRecipe recipe;
    bool round_scales;
    bool transposed_scales;  // API v1's memory order
    bool global_ids;
    uint32_t direct;  // bits of DirectPart that this rank's windows allow

    const std::byte* tokens;  // [tokens][source_row_bytes]
    uint32_t source_row_bytes;
    uint32_t row_bytes;  // as delivered
    const std::byte* scales;
    uint32_t scale_bytes;  // a row's, as delivered; 0: none
    const float* topk_weights;

    std::byte* out_tokens;
    std::byte* out_scales;
    float* out_weights;
    int32_t* out_topk_idx;
    int32_t* counters;  // may be null (rank-major)
    void* offsets;      // [local experts] expert-major; may be null, like the total
    void* total;
    bool offsets_are_64_bit;
    bool total_is_64_bit;
    bool tells_places;      // one of the two is there
    PeerMap token_windows;  // every rank's out_tokens and out_scales, where direct
    PeerMap scale_windows;
};
using LlDispatchArgs = LlDispatchArgsOf<LlCommon>;

// Which forms the rows of a combine may have: a kernel for LL128 rows alone is smaller, and keeps more in registers.
enum class RowForms : uint32_t { kLl128, kBoth };

template <typename Common>
struct LlCombineArgsOf {
    Common common;
    LlCombineShared shared;
    DType dtype;
    LlCombineWire wire;
    RowForms forms;
    const std::byte* tokens;  // expert-major [local experts][ranks * max tokens][row_bytes], rank-major [ranks][max
                              // tokens][row_bytes]
    const float* row_scales;  // of recipes that take one per row of tokens
    uint32_t row_bytes;
    uint32_t wire_bytes;
    const float* topk_weights;  // this rank's own tokens'; expert-major
    std::byte* out_tokens;
    uint32_t segment_bytes;  // of a token's sum by one warp
    uint32_t segments;       // of a token
};
using LlCombineArgs = LlCombineArgsOf<LlCommon>;

}  // namespace crossdock
