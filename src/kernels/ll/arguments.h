// SPDX-License-Identifier: Apache-2.0
// What the low-latency kernels receive, by value. Pointers are device memory of this rank unless said otherwise.
#pragma once

#include "device/numeric.h"
#include "device/peer_map.h"
#include "kernels/agreement.h"
#include "kernels/elastic.h"
#include "kernels/ll/combine_memory.h"
#include "kernels/ll/dispatch_memory.h"
#include "kernels/ll/handle_memory.h"
#include "kernels/ll/outbox.h"
#include "kernels/ll/recipes.h"
#include "kernels/ll/steps.h"
#include "kernels/row_blocks.h"
#include "kernels/wait_steps.h"

namespace crossdock {

// kCancel: with kReceiveHalf, releases the buffer of a pending operation without reading it.
enum LlHalves : uint32_t { kSendHalf = 1, kReceiveHalf = 2, kCancel = 4 };

// The form of a rank's own rows, if it is known before the launch.
enum class LlForm : uint32_t { kEither, kLl128, kPlain };

// Of handles whose operations overlap with experts' kernels (kernels/ll/overlap.h).
struct LlOverlap : RowBlocks {
    const uint32_t* done;  // [zones][blocks], the caller's; null: those in memory
    uint32_t done_value;   // 0: a combine waits for nothing
};

template <typename Scope>
struct LlCommonOf {
    // For the general kernel; kernels for one case (kernels/ll/variants.h) know more.
    static constexpr uint32_t kMostTopk = kMaxTopk;
    static constexpr LlForm kForm = LlForm::kEither;
    static constexpr bool kFewTokens = false;  // at most as many as a block has threads

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
    bool traps_overflow;  // rows past an expert's capacity (only repeated ids cause them) fail the group
    uint32_t topk;        // this handle's
    uint32_t num_tokens;
    const void* topk_idx;          // [tokens][topk] global expert ids
    uint32_t rank_of_expert_mult;  // id * this >> kRankOfExpertShift is the expert's rank

    // If both halves run, some blocks may send while others receive, or all do both, one after the other.
    uint32_t send_blocks;     // the first ones
    uint32_t receive_blocks;  // the last ones
    uint32_t tokens_per_block;
    uint32_t log2_blocks_per_token;  // of LL128 rows
    bool own_rows_are_ll128;         // those of this rank's tokens, both ways
    LlWarpLayout warp_layout;

    // Groups of several LSA teams.
    Reach reach;
    LlOutbox outbox;
    Region<uint32_t> cells;  // in the handle's memory (LlHandleLayout)

    LlOverlap overlap;

    // This rank's terms.
    void set(Term term, uint64_t value) { scope.terms = Terms{scope.terms}.with(term, value).word; }
    void set_folded(Term term, uint64_t value) { scope.terms = Terms{scope.terms}.with_folded(term, value).word; }
};
using LlCommon = LlCommonOf<WaitScope>;

inline constexpr uint32_t kRankOfExpertShift = 31;
static_assert(kRankOfExpertShift < 32, "the factor for one expert per rank, 2^shift, is a uint32_t");

template <typename Common>
struct LlDispatchArgsOf {
    static constexpr bool kOneBatch = false;  // a block sends its tokens at once, in whole rows
    static constexpr bool kMayOverlap = true;

    Common common;
    LlDispatchShared shared;
    LlDispatchWire wire;
    bool round_scales;
    bool transposed_scales;  // API v1's memory order
    bool global_ids;
    uint32_t direct;     // bits of DirectPart that this rank's windows allow
    bool own_rows_stay;  // rows for this rank wait in their stages instead of going through its buffer

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
    bool tells_places;      // offsets or total is not null
    PeerMap token_windows;  // every rank's out_tokens and out_scales, if direct
    PeerMap scale_windows;
    // Elastic: instead of scales, topk_weights, and all outputs except out_tokens.
    bool is_elastic;
    ElasticDispatchArgs elastic;
};
using LlDispatchArgs = LlDispatchArgsOf<LlCommon>;

// The forms that rows of a combine may have: a kernel for LL128 rows only is smaller and keeps more in registers.
enum class RowForms : uint32_t { kLl128, kBoth };

template <typename Common>
struct LlCombineArgsOf {
    static constexpr uint32_t kRowsAtOnce = 4;  // LL128 rows of a token that a warp sums together
    static constexpr bool kMayOverlap = true;

    Common common;
    LlCombineShared shared;
    DType dtype;
    LlCombineWire wire;
    RowForms forms;
    bool leaves_out;          // choices may be omitted: their rows are not read
    bool own_rows_stay;       // rows that return to this rank are summed where they are
    const std::byte* tokens;  // expert-major [local experts][ranks * max tokens][row_bytes], rank-major [ranks][max
                              // tokens][row_bytes]
    const float* row_scales;  // of recipes that take one per row of tokens
    uint32_t row_bytes;
    uint32_t wire_bytes;
    const float* topk_weights;  // this rank's own tokens'; expert-major
    std::byte* out_tokens;
    uint32_t segment_bytes;  // of a token's sum by one warp
    uint32_t segments;       // of a token
    // Elastic: unweighted sums of rows by rank, of the sender's sums, or of rows of choices (invariant groups).
    bool is_elastic;
    ElasticCombineArgs elastic;
};
using LlCombineArgs = LlCombineArgsOf<LlCommon>;

}  // namespace crossdock
