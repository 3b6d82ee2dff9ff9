// SPDX-License-Identifier: Apache-2.0
// The memory layouts of LL: the arena that ranks share, a handle's memory, and a block's shared memory. One description
// for hosts and kernels. docs/protocol.md draws the arena.
//
// Every rank holds one arena of two or three buffers. An operation (dispatch or combine) uses one buffer, the same on
// every rank:
//   dispatch: slot (source rank, i) of the target holds the i-th token that this source sends there: row and scales;
//   combine:  cell (token, j) of the source rank holds the j-th row that returns for its token.
// A row has one of two forms: LL128, lines of 128 bytes that carry their own tags, or plain bytes with a separate flag.
// Both use the same place. All words that announce something carry the operation's epoch, so nothing is reset.
#pragma once

#include "device/row_stage.h"
#include "kernels/entry.h"
#include "kernels/geometry.h"

namespace crossdock {

inline constexpr int kNumBuffers = 3;     // two may be held by pending send_only operations, one remains
inline constexpr int kFewestBuffers = 2;  // of groups with zero_copy on, to save memory

// An LL128 row: every line is payload followed by a tag of 8 bytes.
inline constexpr uint32_t kLineBytes = 128;
inline constexpr uint32_t kLinePayload = 120;
inline constexpr uint32_t kMostLl128RowBytes = 32768;  // longer rows are plain, as only bandwidth matters

CROSSDOCK_HOST_DEVICE constexpr uint32_t lines_of(uint32_t bytes) { return (bytes + kLinePayload - 1) / kLinePayload; }

// What a source wrote directly into the receiver's tensors.
enum DirectPart : uint32_t { kDirectTokens = 1, kDirectScales = 2 };

// A row's first tagged word holds its RowOrigin; word 1 + k holds choice k: its global expert id (-1: dropped) in the
// lower half, in the upper half its number among this source's rows for that expert (expert-major) or its weight
// (rank-major).
inline constexpr uint32_t kTokenBits = 23;
inline constexpr uint32_t kTargetBits = 7;
inline constexpr uint32_t kDirectBits = 3;
inline constexpr uint32_t kFirstChoiceBits = 31;
inline constexpr uint32_t kMaxTokensOfRank = (1u << kTokenBits) - 1;
inline constexpr uint32_t kMaxChoicesOfRank = (1u << kFirstChoiceBits) - 1;  // tokens times topk
static_assert(kTokenBits + kTargetBits + kDirectBits + kFirstChoiceBits <= 64, "a row's origin is one 64-bit payload");
static_assert(kMaxTopk <= 1 << kTargetBits, "an origin counts a token's ranks, of which there are at most top-k");
static_assert((kDirectTokens | kDirectScales) < 1 << kDirectBits, "an origin holds every DirectPart");
static_assert((kDirectTokens | kDirectScales) < 1 << Entry::kPartBits, "an entry holds every DirectPart");

struct RowOrigin {
    uint32_t token_idx;
    uint32_t target_idx;    // of the receiving rank among the token's ranks, in the order of their first choices
    uint32_t direct;        // DirectPart
    uint32_t first_choice;  // number of the source's earlier choices on the receiving rank; expert-major

    CROSSDOCK_HOST_DEVICE static constexpr RowOrigin of(uint64_t payload) {
        return {static_cast<uint32_t>(payload) & kMaxTokensOfRank,
                static_cast<uint32_t>(payload >> kTokenBits) & ((1u << kTargetBits) - 1),
                static_cast<uint32_t>(payload >> kDirectShift) & ((1u << kDirectBits) - 1),
                static_cast<uint32_t>(payload >> kFirstChoiceShift)};
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t payload() const {
        return uint64_t{first_choice} << kFirstChoiceShift | uint64_t{direct} << kDirectShift |
               uint64_t{target_idx} << kTokenBits | token_idx;
    }

    static constexpr uint32_t kDirectShift = kTokenBits + kTargetBits;
    static constexpr uint32_t kFirstChoiceShift = kDirectShift + kDirectBits;
};

// What the header of an elastic dispatch's row holds for each choice instead.
struct ElasticChoice {
    static constexpr uint32_t kExpertBits = 15;
    static constexpr uint32_t kNumberBits = 16;
    static constexpr uint32_t kNoExpert = (1u << kExpertBits) - 1;
    static constexpr uint32_t kMostExperts = kNoExpert;               // of all ranks
    static constexpr uint32_t kMostTokens = (1u << kNumberBits) - 1;  // of a rank

    uint32_t expert;  // global id, or kNoExpert
    uint32_t number;  // among this source's rows for that expert
    bool repeats;     // an earlier choice of the token has the row
    uint32_t weight;  // bits

    CROSSDOCK_HOST_DEVICE static constexpr ElasticChoice of(uint64_t payload) {
        const uint32_t low = static_cast<uint32_t>(payload);
        return {low & kNoExpert, low >> kExpertBits & kMostTokens, low >> 31 != 0,
                static_cast<uint32_t>(payload >> 32)};
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t payload() const {
        return uint64_t{weight} << 32 | (repeats ? 1u << 31 : 0) | number << kExpertBits | expert;
    }
};
static_assert(ElasticChoice::kExpertBits + ElasticChoice::kNumberBits == 31, "the highest bit is `repeats`");

// The numbers that an arena is made for. Handles with fewer choices use the same strides.
struct LlGeometry {
    uint32_t num_ranks;
    uint32_t num_experts;
    uint32_t max_tokens;       // per rank and operation
    uint32_t row_capacity;     // bytes of a token row with its scales, a multiple of 16
    uint32_t topk;             // the largest
    uint32_t cells_per_token;  // rows that may return for one token
    uint32_t num_buffers;      // at most kNumBuffers
    uint32_t ll128_tokens;     // ranks with at most this many tokens may send LL128 rows

    CROSSDOCK_HOST_DEVICE constexpr bool fits_all_in_ll128() const { return ll128_tokens == max_tokens; }
    CROSSDOCK_HOST_DEVICE constexpr uint32_t experts_per_rank() const { return num_experts / num_ranks; }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t row_stride() const {  // of either form
        return ll128_tokens > 0 ? uint64_t{kLineBytes} * lines_of(row_capacity) : align_up(row_capacity, 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t num_slots() const { return uint64_t{num_ranks} * max_tokens; }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t num_cells() const { return uint64_t{max_tokens} * cells_per_token; }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t count_words_per_source() const { return 1 + experts_per_rank(); }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t header_words() const { return 1 + topk; }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t num_rows() const {
        return num_slots() > num_cells() ? num_slots() : num_cells();
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t weight_words() const { return (uint64_t{topk} + 1) / 2; }  // a token's

    // Byte offsets inside a buffer; each is the end of the part before it.
    CROSSDOCK_HOST_DEVICE constexpr uint64_t entries_offset() const { return 0; }  // TaggedWord [ranks]: Entry
    CROSSDOCK_HOST_DEVICE constexpr uint64_t counts_offset() const {               // u64 [ranks][1 + local experts]
        return align_up(entries_offset() + 16 * uint64_t{num_ranks}, 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t row_flags_offset() const {  // u64 [max(slots, cells)]
        return align_up(counts_offset() + 8 * num_ranks * count_words_per_source(), 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t headers_offset() const {  // TaggedWord [slots][1 + topk]
        return align_up(row_flags_offset() + 8 * num_rows(), 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t weights_offset() const {  // TaggedWord [ranks][tokens][weight words]
        return align_up(headers_offset() + 16 * num_slots() * header_words(), 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t rows_offset() const {
        return align_up(weights_offset() + 16 * num_slots() * weight_words(), 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t buffer_bytes() const { return rows_offset() + num_rows() * row_stride(); }

    // Byte offsets inside the arena.
    CROSSDOCK_HOST_DEVICE constexpr uint64_t entered_offset() const { return 0; }  // u64 [ranks]
    CROSSDOCK_HOST_DEVICE constexpr uint64_t barrier_offset() const {              // u64 [2][ranks]
        return align_up(entered_offset() + uint64_t{8} * num_ranks, 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t buffer_offset(int buffer) const {
        return align_up(barrier_offset() + uint64_t{16} * num_ranks, 128) +
               static_cast<uint64_t>(buffer) * buffer_bytes();
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t arena_bytes() const {
        return buffer_offset(static_cast<int>(num_buffers));
    }
};

// The same, computed once by the host: kernels of a few microseconds have no time for products and roundings.
struct LlOffsets {
    uint64_t entered;
    uint64_t buffers;
    uint64_t buffer_bytes;
    // In a buffer.
    uint64_t entries;
    uint64_t counts;
    uint64_t row_flags;
    uint64_t headers;
    uint64_t weights;
    uint64_t rows;
    // Bytes from one to the next.
    uint32_t count_stride;  // of a source's
    uint32_t header_stride;
    uint32_t weight_stride;  // of a token's
    uint32_t row_stride;

    uint32_t num_slots;
    uint32_t num_cells;
    uint32_t experts_per_rank;
    uint32_t absent_buffers;  // bits

    static constexpr LlOffsets of(const LlGeometry& arena) {
        return {arena.entered_offset(),
                arena.buffer_offset(0),
                arena.buffer_bytes(),
                arena.entries_offset(),
                arena.counts_offset(),
                arena.row_flags_offset(),
                arena.headers_offset(),
                arena.weights_offset(),
                arena.rows_offset(),
                static_cast<uint32_t>(8 * arena.count_words_per_source()),
                static_cast<uint32_t>(16 * arena.header_words()),
                static_cast<uint32_t>(16 * arena.weight_words()),
                static_cast<uint32_t>(arena.row_stride()),
                static_cast<uint32_t>(arena.num_slots()),
                static_cast<uint32_t>(arena.num_cells()),
                arena.experts_per_rank(),
                ((1u << kNumBuffers) - 1) & ~((1u << arena.num_buffers) - 1)};
    }
};

// A rank's own words in device memory. Each kernel advances them by one operation, on the device, so that graph replays
// count too. All ranks run the same operations in the same order, so they agree on epoch and buffer without any
// exchange.
//
// Every block reads the clock and then takes a ticket. The block with the last ticket writes the next operation's
// clock, because no block needs the current one any more.
struct LlArenaState {
    uint64_t clock;  // LlClock
    // free_from[epoch % 2][buffer]: a peer that has entered this epoch has finished reading the buffer. Read by the
    // operation of that epoch, written by the one before it.
    uint64_t free_from[2][kNumBuffers];
    uint32_t tickets;
    uint32_t blocks_done;  // only with masks
    uint32_t blocks_put;   // only in groups of several LSA teams
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

// What one source sent in a dispatch.
struct LlReceived {
    uint32_t rows;
    uint32_t choices;           // of experts here; expert-major
    uint32_t returns_as_ll128;  // 1 or 0
    uint32_t first_row;         // elastic: the source's first among all received rows
};

// A received row: where it returns to and, expert-major or elastic, where its choices are. Followed by int32_t
// rows[topk]: the index of choice k's row among all rows here, -1 if it is another rank's, dropped or without room.
// Elastic: -2 - index if an earlier choice has the row; rank-major, all choices of experts here have index 0.
struct RowRecord {
    uint32_t token_idx;
    uint32_t cell;  // if one row per rank returns
};

// One row of an expert, expert-major: choices are numbered by source, token and k.
struct LlChoice {
    int32_t row_idx;  // -1: the choice had no room at its expert
    uint32_t cell;
};

// The index, among all rows here, of the row of an own choice (expert-major) or an own token (rank-major); or, expert-
// major, kNoRoom: its expert had no room for it; kOtherRank: it is another rank's, or dropped.
enum OwnRow : int32_t { kNoRoom = -1, kOtherRank = -2 };

inline constexpr uint64_t kReceivedOffset = 64;
static_assert(sizeof(RowRecord) == 8, "a record's rows follow it (record_bytes)");

// A handle's own memory: what a combine needs from the dispatch before it.
struct LlHandleGeometry {
    uint32_t num_ranks;
    uint32_t experts_per_rank;
    uint32_t max_tokens;
    uint32_t topk;

    // LlPending comes first.
    CROSSDOCK_HOST_DEVICE constexpr uint64_t received_offset() const { return kReceivedOffset; }  // LlReceived [ranks]
    CROSSDOCK_HOST_DEVICE constexpr uint64_t records_offset() const {  // RowRecord [ranks][tokens]
        return align_up(received_offset() + sizeof(LlReceived) * num_ranks, 16);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t record_bytes() const { return align_up(8 + uint64_t{4} * topk, 16); }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t choices_offset() const {  // LlChoice [ranks][tokens * topk]
        return records_offset() + record_bytes() * num_ranks * max_tokens;
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t own_rows_offset() const {  // i32 [tokens][topk], or [tokens]: OwnRow
        return choices_offset() + sizeof(LlChoice) * num_ranks * max_tokens * topk;
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t dispatched_ids_offset() const {  // i32 [tokens][topk], -1: dropped
        return own_rows_offset() + sizeof(int32_t) * max_tokens * topk;
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t bytes() const {
        return dispatched_ids_offset() + sizeof(int32_t) * max_tokens * topk;
    }
};

struct LlHandleOffsets {
    uint64_t records;
    uint64_t choices;
    uint64_t own_rows;  // followed by the ids that were dispatched, of as many choices
    uint32_t record_stride;
    uint32_t choices_of_source;

    static constexpr LlHandleOffsets of(const LlHandleGeometry& handle) {
        return {handle.records_offset(), handle.choices_offset(), handle.own_rows_offset(),
                static_cast<uint32_t>(handle.record_bytes()), handle.max_tokens * handle.topk};
    }
};

// The handle's send_only operation whose receive half is pending.
struct LlPending {
    uint64_t epoch;
    uint32_t buffer;
};
static_assert(sizeof(LlPending) <= kReceivedOffset, "it lies before what was received");

struct LlWarpLayout {
    uint32_t warps_per_block;
    uint32_t receive_warps;   // the block's last warps receive; a warp may do both, one after the other
    uint32_t num_stages;      // per block, for rows to send
    uint32_t receive_stages;  // dispatch: for received rows, one for each of the block's last warps
    uint32_t chunk_bytes;     // bytes of a row per pass through a stage
};

// The beginning of every block's shared memory, followed by u64 [ranks]: the latest operation that this block has seen
// each peer enter.
struct LlBlockHead {
    uint64_t clock;
    uint64_t start_ns;
    uint64_t free_from[2 * kNumBuffers];
    uint64_t pending_epoch;
    uint32_t pending_buffer;
    uint32_t has_failed;
    uint32_t verdict;  // of must_receive_again and is_last_to_put
    int is_refused;    // not 0: the group has failed before anything was received
    // With masks, of must_receive_again:
    uint32_t losses;   // counted before the latest masks were read
    uint32_t is_last;  // 1: this block has finished last

    CROSSDOCK_HOST_DEVICE static constexpr uint64_t bytes(uint32_t num_ranks) {
        return align_up(sizeof(LlBlockHead) + 8 * uint64_t{num_ranks}, 16);
    }
};

// The targets of one token's row, in shared memory: the ranks that it goes to, in the order of their first choices.
struct TokenPlan {
    std::byte** rows;      // [targets] the slot there; null: the peer is lost, or it is own_target
    uint32_t* expert_ids;  // [k] or kDropped
    uint32_t* ranks;       // [k] or kDropped
    uint32_t* numbers;     // [k] among this source's rows for that expert; expert-major
    uint32_t* weights;     // [k] bits; rank-major and elastic
    uint32_t* row_idx;     // [targets] among this source's rows there
    uint32_t* choices;     // [targets] the rank's first choice
    uint32_t* num_targets;
    uint32_t* own_target;  // this rank, if its row stays; else kDropped

    CROSSDOCK_HOST_DEVICE static constexpr uint32_t bytes(uint32_t topk) {
        return static_cast<uint32_t>(align_up(32 * uint64_t{topk} + 8, 16));
    }
    CROSSDOCK_HOST_DEVICE static TokenPlan of(std::byte* memory, uint32_t topk) {
        uint32_t* words = reinterpret_cast<uint32_t*>(memory + uint64_t{8} * topk);
        return {reinterpret_cast<std::byte**>(memory),
                words,
                words + topk,
                words + 2 * topk,
                words + 3 * topk,
                words + 4 * topk,
                words + 5 * topk,
                words + 6 * topk,
                words + 6 * topk + 1};
    }
};

// A block's shared memory: one description for the launch and the kernel. Offsets in bytes.
struct LlDispatchShared {
    uint32_t expert_counts;  // send: i32 [experts] choices counted so far
    uint32_t rank_counts;    // send: i32 [ranks] rows counted so far
    uint32_t first_rows;     // receive: u32 [ranks][local experts]
    uint32_t zones;          // receive: u32 [3][local experts] of elastic dispatches
    uint32_t received;       // receive: u32 [5][ranks + 1]
    uint32_t plans;          // send: [stages] plans
    uint32_t placements;     // receive: u32 [warps][2 topk + 2]
    uint32_t stages;         // [stages + receive stages][stage_bytes]
    uint32_t stage_bytes;
    uint32_t tail;  // in a stage's data, after a full chunk: scales
    uint32_t bytes;

    static constexpr LlDispatchShared of(const LlGeometry& arena, const LlWarpLayout& warp_layout, uint32_t topk,
                                         uint32_t scale_bytes) {
        LlDispatchShared shared{};
        uint64_t at = LlBlockHead::bytes(arena.num_ranks);
        shared.expert_counts = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{4} * arena.num_experts, 16);
        shared.rank_counts = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{4} * arena.num_ranks, 16);
        shared.first_rows = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{4} * arena.num_experts, 16);
        shared.zones = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{12} * arena.experts_per_rank(), 16);
        shared.received = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{20} * (arena.num_ranks + 1), 16);
        shared.plans = static_cast<uint32_t>(at);
        at = align_up(at + TokenPlan::bytes(topk) * warp_layout.num_stages, 16);
        shared.placements = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{4} * (2 * topk + 2) * warp_layout.warps_per_block, 128);
        shared.stages = static_cast<uint32_t>(at);
        shared.tail = warp_layout.chunk_bytes;
        shared.stage_bytes = static_cast<uint32_t>(
            align_up(uint64_t{kStageHeadBytes} + warp_layout.chunk_bytes + align_up(scale_bytes, 16), 128));
        shared.bytes = static_cast<uint32_t>(at + uint64_t{shared.stage_bytes} *
                                                      (warp_layout.num_stages + warp_layout.receive_stages));
        return shared;
    }
};

// Offsets in bytes.
struct LlCombineShared {
    uint32_t return_counts;  // i32 [2][ranks + 1], u32 [ranks]
    uint32_t summands;       // i64 [warps][topk], f32 [warps][topk], u32 [warps][topk]
    uint32_t gin_ranks;      // u32 [ranks] 1: has tokens of this rank; of groups of several LSA teams
    uint32_t stages;
    uint32_t stage_bytes;
    uint32_t bytes;

    static constexpr LlCombineShared of(const LlGeometry& arena, const LlWarpLayout& warp_layout, uint32_t topk,
                                        bool has_several_teams) {
        LlCombineShared shared{};
        uint64_t at = LlBlockHead::bytes(arena.num_ranks);
        shared.return_counts = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{12} * (arena.num_ranks + 1), 16);
        shared.summands = static_cast<uint32_t>(at);
        at = align_up(at + uint64_t{16} * topk * warp_layout.warps_per_block, 128);
        shared.gin_ranks = static_cast<uint32_t>(at);
        if (has_several_teams) at = align_up(at + uint64_t{4} * arena.num_ranks, 128);
        shared.stages = static_cast<uint32_t>(at);
        shared.stage_bytes = static_cast<uint32_t>(align_up(uint64_t{kStageHeadBytes} + warp_layout.chunk_bytes, 128));
        shared.bytes = static_cast<uint32_t>(at + uint64_t{shared.stage_bytes} * warp_layout.num_stages);
        return shared;
    }
};

}  // namespace crossdock
