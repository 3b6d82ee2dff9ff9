// SPDX-License-Identifier: Apache-2.0
// What the high-throughput kernels receive, by value. Pointers are device memory of this rank unless said otherwise.
#pragma once

#include <type_traits>

#include "device/peer_map.h"
#include "device/wait_records.h"
#include "kernels/agreement.h"
#include "kernels/elastic.h"
#include "kernels/ht/outbox.h"
#include "kernels/ht/phases.h"
#include "kernels/ht/recipes.h"
#include "kernels/reach.h"
#include "kernels/row_blocks.h"
#include "kernels/wait_steps.h"

namespace crossdock {

// Advances by one operation per kernel, on the device, so that graph replays count too: every block takes a ticket, and
// the block with a grid's last one advances the epoch.
struct HtState {
    uint64_t clock;       // epoch, and tickets taken (kHtTicketBits)
    uint32_t arrived[2];  // blocks of the running kernel at its barriers; zero between kernels
    uint32_t announced;   // several teams: those of an update that have announced their tokens; zero between kernels
    uint32_t claimed[2];  // by epoch % 2: work that warps of all blocks have taken; cleared by the operation before
    uint64_t heartbeats;  // that waits have sent; only grows
};
inline constexpr uint32_t kHtTicketBits = 18;
static_assert(64 - kHtTicketBits >= kEpochBits, "the clock counts epochs as far as announcing words hold them");

// The tables in the handle's memory. A table [ranks][chunks] has `chunks` entries per rank, of which a source with
// fewer tokens uses the first ones.
struct HtTables {
    HtRouting* routing;
    int32_t* ids;             // [tokens][topk] global expert ids, -1: dropped
    uint32_t* bases;          // [ranks] routes (teams.h): number of the source's first row at the LSA peer
    uint32_t* source_tokens;  // [ranks]
    uint32_t* expert_rows;    // [local experts] received rows
    uint32_t* zones;          // [local experts + 1] expert-major: first slots; the last: padded total
    uint32_t* sent_masks;     // [ranks][chunks] which tokens of a chunk go there
    uint32_t* sent_firsts;    // [ranks][chunks + 1] how many tokens before that chunk go there
    uint32_t* masks;          // [1 + local experts][ranks][chunks] which tokens of a source's chunk are sent here
    uint32_t* firsts;         // [1 + local experts][ranks][chunks] number of the chunk's first row, among all rows
                              // (column 0) or among those of an expert
    uint64_t* bitmaps;        // [ranks][tokens][words] the local experts of a token
    // Elastic dispatches: [rows][topk] by column of the token's choices, which of its local experts in ascending order
    // it is; kNoColumn: none. What is kept here is checked where it is used.
    uint8_t* columns;
    // Several teams.
    uint32_t* rail_masks;       // [ranks][chunks] routes: which tokens of a source in another team go to the LSA peer
    uint32_t* rail_firsts;      // [ranks][chunks + 1]
    uint32_t* crossing_masks;   // [2][teams][chunks] which own tokens go to that team; which of the tokens that this
                                // rank forwards come from there
    uint32_t* crossing_firsts;  // [2][teams][chunks + 1]
    uint32_t chunks;
    uint32_t words;

    static uint64_t bytes(const HtHandleGeometry& handle) { return view_bytes<HtTables, uint64_t>(handle); }
    constexpr void lay_out(auto& memory, const HtHandleGeometry& handle) {
        const uint64_t ranks = handle.num_ranks;
        const uint64_t entries = handle.column_entries();
        chunks = handle.chunks();
        words = handle.bitmap_words();
        memory.align(16);
        memory.take(routing, 1);
        memory.take(ids, uint64_t{handle.max_tokens} * handle.topk);
        memory.take(bases, ranks);
        memory.take(source_tokens, ranks);
        memory.take(expert_rows, handle.experts_per_rank);
        memory.take(zones, uint64_t{1} + handle.experts_per_rank);
        memory.take(sent_masks, entries);
        memory.take(sent_firsts, entries + ranks);
        memory.take(masks, handle.columns() * entries);
        memory.take(firsts, handle.columns() * entries);
        memory.take(bitmaps, ranks * handle.max_tokens * words);
        memory.take(columns, ranks * handle.max_tokens * handle.topk);
        if (handle.teams() == 1) return;
        memory.take(rail_masks, entries);
        memory.take(rail_firsts, entries + ranks);
        memory.take(crossing_masks, uint64_t{2} * handle.teams() * chunks);
        memory.take(crossing_firsts, uint64_t{2} * handle.teams() * (chunks + 1));
    }
};

inline constexpr uint8_t kNoColumn = UINT8_MAX;
static_assert(kMaxTopk < kNoColumn, "a token has fewer experts");

struct HtCommon {
    HtGeometry arena;
    HtOffsets offsets;  // of arena
    PeerMap peers;      // the arenas of the team's ranks
    Reach reach;        // of the other ranks
    HtOutbox outbox;    // several teams
    uint32_t rank;
    HtState* state;
    HtTables tables;
    WaitScope scope;

    Terms terms;  // this rank's; the kernel adds the routing in use
    bool expert_major;
    uint32_t topk;
    uint32_t num_tokens;      // of this rank
    uint32_t budget;          // rows (flat) or slots (expert-major) that this rank may receive
    uint32_t channels;        // of this operation: its blocks
    uint32_t unused_blocks;   // GPUs: the grid's first ones, which return at once
    bool has_windows;         // peers may access this rank's tensor; a rank without rows may have none
    bool windows_are_inputs;  // of a dispatch: they hold its tokens, which receivers read
    // With has_windows: where the tensor begins in its window (folded_window_offset), and a hash of its places in all
    // windows; the same on all such ranks. Of inputs, which may lie anywhere, both are parts of a hash.
    uint64_t window_offset;
    uint64_t window_places;
    uint64_t window_rows;  // how many rows there are from there to the window's end
};

// A block's view of a peer, in shared memory.
enum PeerState : uint32_t {
    kAbsent = 0,
    kEntered = 1,
    kDirect = 2,   // entered, and rows between the two ranks are written to (or read from) the tensor directly: in a
                   // window, or this rank's own
    kReadable = 3  // dispatch: entered, and receivers read the peer's tokens (or this rank's own) where they are
};

// The caller's counters; any may be null.
struct HtCounters {
    void* experts;
    void* offsets;
    void* total;
    bool are_64_bit;
    bool total_is_64_bit;
};

struct HtUpdateArgs {
    HtCommon common;
    const void* topk_idx;  // [tokens][topk] global expert ids
    bool ids_are_64_bit;
    uint32_t alignment;  // of an expert's zone
    bool drops;          // more than the budget is dropped; else it fails the group
    uint32_t cleans;     // of the group's masks so far
    HtRoutingMaker maker;
    HtCounters counters;
    uint64_t* host_total;  // host-visible: the update's number, then the total; may be null
    uint64_t update_number;
};

// The slots of a ring. A packet of rows holds a row and its scales, or rows of choices; one of weights those of a
// chunk.
struct HtSlots {
    uint32_t stride;
    uint32_t num;
};

// What a block knows of a ring between teams; in shared memory.
struct GinRingState {
    uint32_t taken[2];  // of each of two batches, how many packets have been read
    uint32_t arrived;   // packets [0, arrived) have arrived
    uint32_t filled;    // rows, known to the warp that sends them: packets [0, filled) are in the outbox,
    uint32_t put;       // [0, put) have been put
};

// Where in a block's shared memory groups of several teams have these: after the block's head.
inline constexpr uint32_t kGinStatesOffset = 32;

CROSSDOCK_HOST_DEVICE constexpr uint32_t num_gin_rings(uint32_t ranks, uint32_t teams) {
    return teams > 1 ? teams + ranks : 0;
}

struct HtShared {
    SharedRegion<uint32_t> peers;     // [ranks] PeerState
    SharedRegion<std::byte> plans;    // [warps][plan_bytes] HtPlan
    uint32_t plan_bytes;              // of a warp
    SharedRegion<std::byte> batches;  // [batches][batch_bytes] HtBatch
    uint32_t batch_bytes;
    SharedRegion<std::byte> notes;                 // [notes] HtNote (flags.h)
    SharedRegion<std::byte> plan_heads;            // of a pipeline (sum_pipeline.h)
    SharedRegion<const std::byte*> plan_summands;  // of it: [2][planned_rows][topk] places of rows
    SharedRegion<std::byte> stages;  // [stages][stage_bytes]: those of the first warp, of the second, ...; those of
                                     // a pipeline
    uint32_t stage_bytes;
    uint32_t bytes;
};

inline constexpr uint32_t kSumPlanHeadBytes = 96;

inline constexpr uint32_t kNotesOfSender = 3;
CROSSDOCK_HOST_DEVICE constexpr uint32_t note_bytes(uint32_t lanes) {
    return static_cast<uint32_t>(align_up(40 + 8 * uint64_t{lanes}, 16));
}

// Of a block's warps, the first ones send rows, the next ones receive them, and the last ones exchange weights.
struct HtWarpLayout {
    uint32_t producers;
    uint32_t consumers;
    uint32_t weight_warps;
    uint32_t producer_stages;  // of a warp: 1 or 2
    uint32_t consumer_stages;
    uint32_t chunk_bytes;     // of a row per pass through a stage
    uint32_t crossers = 0;    // several teams, the last warps: these send to other teams,
    uint32_t forwarders = 0;  // and these forward rows from there, or sum rows that return there
    // The block's first warps may be a pipeline (sum_pipeline.h): a planner, a loader, and these. They are the
    // producers if those send sums, and additional warps if rows in windows are summed.
    uint32_t summers = 0;
    uint32_t senders = 0;
    uint32_t summed_bytes = 0;   // of a part, by a summer
    uint32_t shared_stages = 0;  // of the pipeline, or the first ones of warps' own
    uint32_t announcers = 0;     // 0 or 1, behind those that exchange weights: raises flags for the senders of rows

    CROSSDOCK_HOST_DEVICE constexpr uint32_t warps() const {
        return producers + consumers + weight_warps + announcers + crossers + forwarders;
    }
    CROSSDOCK_HOST_DEVICE constexpr bool is_announcer(uint32_t warp) const {
        const uint32_t before = producers + consumers + weight_warps;
        return warp >= before && warp < before + announcers;
    }
    // What senders tell the announcer (flags.h).
    CROSSDOCK_HOST_DEVICE constexpr uint32_t noting_senders() const {
        return announcers == 0 ? 0 : summers > 0 ? senders : producers;
    }
    CROSSDOCK_HOST_DEVICE constexpr uint32_t notes() const { return noting_senders() * kNotesOfSender; }
    CROSSDOCK_HOST_DEVICE constexpr uint32_t pipeline() const { return summers == 0 ? 0 : 2 + summers + senders; }
    // One for each warp that looks up rows; a pipeline's planner has two.
    CROSSDOCK_HOST_DEVICE constexpr uint32_t batches() const {
        const uint32_t most = producers > consumers ? producers : consumers;
        return most < 2 || (summers > 0 && producers == pipeline()) ? 2 : most;
    }
    // The pieces in which a row is quantised (recipes.h).
    CROSSDOCK_HOST_DEVICE constexpr uint32_t quantised_bytes() const {
        return summers > 0 ? summed_bytes : chunk_bytes;
    }
    CROSSDOCK_HOST_DEVICE constexpr uint32_t stages() const {
        const uint32_t own = producers * producer_stages + consumers * consumer_stages;
        return own > shared_stages ? own : shared_stages;
    }
};

struct HtDispatchArgs {
    HtCommon common;
    HtWarpLayout warp_layout;
    HtShared shared;
    HtSlots rows;
    HtSlots gin_rows;  // between teams
    HtSlots weight_slots;
    bool with_weights;  // forward
    bool global_ids;

    const std::byte* tokens;  // [tokens][row_bytes]
    uint32_t row_bytes;
    const std::byte* scales;  // [tokens][scale_bytes]
    uint32_t scale_bytes;
    const float* topk_weights;  // [tokens][topk]

    std::byte* out_tokens;
    std::byte* out_scales;
    float* out_weights;     // flat [rows][topk], expert-major [rows]
    int64_t* out_topk_idx;  // flat [rows][topk]
    uint64_t token_rows;    // of out_tokens; no row beyond is written
    uint64_t weight_rows;   // of out_weights and out_topk_idx
    PeerMap token_windows;  // every rank's out_tokens and out_scales, or tokens and scales (windows_are_inputs)
    PeerMap scale_windows;

    HtCounters counters;  // the same as of Update
};

// Expert-major, without masks: tells the experts' kernel which rows are in place (publish.h).
struct HtPublishingDispatchArgs : HtDispatchArgs {
    RowBlocks published;
};

// Elastic: no windows, weights, ids and counters, and what travels behind a row (scale_bytes) are words
// (elastic_words.h).
struct HtElasticDispatchArgs : HtDispatchArgs {
    ElasticDispatchArgs elastic;
};

struct HtCombineArgs {
    HtCommon common;
    HtWarpLayout warp_layout;
    HtShared shared;
    HtSlots rows;
    HtSlots gin_rows;  // between teams
    HtSlots weight_slots;
    DType dtype;
    HtWire wire;
    uint32_t wire_bytes;    // of a packet: a row, or rows of choices, and what travels beside
    uint32_t wire_part;     // of a stage's part of a row
    uint32_t weight_bytes;  // elastic: of weights by column
    bool with_weights;      // backward: also sends gradients of weights

    const std::byte* tokens;  // [rows][row_bytes]
    uint64_t token_rows;
    uint32_t row_bytes;
    const float* weights;  // flat [rows][topk], expert-major [rows]
    PeerMap token_windows;

    std::byte* out_tokens;  // [tokens][row_bytes]
    float* out_weights;     // [tokens][topk]
};

// Elastic: rows or rows of choices, no windows; weights travel beside rows (elastic_words.h).
struct HtElasticCombineArgs : HtCombineArgs {
    ElasticCombineArgs elastic;
};

template <typename Args>
inline constexpr bool kIsElastic =
    std::is_same_v<Args, HtElasticDispatchArgs> || std::is_same_v<Args, HtElasticCombineArgs>;

template <typename Args>
inline constexpr bool kPublishes = std::is_same_v<Args, HtPublishingDispatchArgs>;

}  // namespace crossdock
