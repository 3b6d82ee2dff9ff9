// SPDX-License-Identifier: Apache-2.0
// The memory layouts of LL: the arena that ranks share, and how a block's shared memory begins. One description for
// hosts and kernels. docs/protocol.md draws the arena.
//
// Every rank holds one arena of two or three buffers. An operation (dispatch or combine) uses one buffer, the same on
// every rank:
//   dispatch: slot (source rank, i) of the target holds the i-th token that this source sends there: row and scales;
//   combine:  cell (token, j) of the source rank holds the j-th row that returns for its token.
// A row has one of two forms: LL128, lines of 128 bytes that carry their own tags, or plain bytes with a separate flag.
// Both use the same place. All words that announce something carry the operation's epoch, so nothing is reset.
#pragma once

#include "device/layout.h"
#include "kernels/entry.h"
#include "kernels/geometry.h"

namespace crossdock {

inline constexpr uint32_t kNumBuffers = 3;  // two may be held by pending send_only operations, one remains
inline constexpr int kFewestBuffers = 2;    // of groups with zero_copy on, to save memory

// An LL128 row: every line is payload followed by a tag of 8 bytes.
inline constexpr uint32_t kLineBytes = 128;
inline constexpr uint32_t kLinePayload = 120;
inline constexpr uint32_t kMostLl128RowBytes = 32768;  // longer rows are plain, as only bandwidth matters

CROSSDOCK_HOST_DEVICE constexpr uint32_t lines_of(uint32_t bytes) { return (bytes + kLinePayload - 1) / kLinePayload; }

// What a source wrote directly into the receiver's tensors.
enum DirectPart : uint32_t { kDirectTokens = 1, kDirectScales = 2 };

// A row's first tagged word holds its RowOrigin; word 1 + k holds choice k: its global expert id (-1: dropped) in the
// lower half, in the upper half its number among this source's rows for that expert (expert-major) or its weight
// (rank-major). Elastic: ElasticChoice (kernels/ll/elastic_dispatch.h).
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

// With several LSA teams, the word behind a row's choices. Cells are then numbered by the rank that fills them, so that
// a put fills many: those of the ranks below come first, then one for each row that the rank returns, in its order.
struct ReturnCells {
    uint32_t row;     // the cell of the row that returns for this one
    uint32_t choice;  // the same of the first choice of an expert here, if a row per choice returns

    CROSSDOCK_HOST_DEVICE static constexpr ReturnCells of(uint64_t payload) {
        return {static_cast<uint32_t>(payload), static_cast<uint32_t>(payload >> 32)};
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t payload() const { return uint64_t{choice} << 32 | row; }
};
// With several LSA teams, the bytes before a cell's row: the word that the cell's flag holds otherwise.
inline constexpr uint32_t kCellFront = 16;

// The numbers that an arena is made for. Handles with fewer choices use the same strides.
struct LlGeometry {
    uint32_t num_ranks;
    uint32_t num_experts;
    uint32_t max_tokens;    // per rank and operation
    uint32_t row_capacity;  // bytes of a token row with its scales, a multiple of 16
    uint16_t topk;          // the largest
    bool is_in_host_memory;
    bool has_several_teams;    // LSA teams: a slot has room for its header, too
    uint32_t cells_per_token;  // rows that may return for one token
    uint32_t num_buffers;      // at most kNumBuffers
    uint32_t ll128_tokens;     // ranks with at most this many tokens may send LL128 rows

    CROSSDOCK_HOST_DEVICE constexpr bool fits_all_in_ll128() const { return ll128_tokens == max_tokens; }
    CROSSDOCK_HOST_DEVICE constexpr uint32_t experts_per_rank() const { return num_experts / num_ranks; }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t row_stride() const {  // of either form
        if (has_several_teams) return align_up(sizeof(TaggedWord) * header_words() + row_capacity, 128);
        return ll128_tokens > 0 ? uint64_t{kLineBytes} * lines_of(row_capacity) : align_up(row_capacity, 128);
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t num_slots() const { return uint64_t{num_ranks} * max_tokens; }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t num_cells() const { return uint64_t{max_tokens} * cells_per_token; }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t count_words_per_source() const { return 1 + experts_per_rank(); }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t header_words() const { return 1 + topk + (has_several_teams ? 1 : 0); }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t num_rows() const {
        return num_slots() > num_cells() ? num_slots() : num_cells();
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t weight_words() const { return (uint64_t{topk} + 1) / 2; }  // a token's
};

// Where everything is in every rank's arena, computed once by the host: kernels of a few microseconds have no time for
// products and roundings.
struct LlOffsets {
    Region<uint64_t> entered;  // [ranks]
    uint64_t buffers;
    uint64_t buffer_bytes;
    // In a buffer.
    Region<TaggedWord> entries;  // [ranks] Entry
    Region<uint64_t> counts;     // [ranks][1 + local experts]
    Region<uint64_t> row_flags;  // [max(slots, cells)]
    Region<TaggedWord> headers;  // [slots][1 + topk]
    Region<TaggedWord> weights;  // [ranks][tokens][weight words]
    Region<std::byte> rows;      // [max(slots, cells)][row_stride]
    // Bytes from one to the next.
    uint32_t count_stride;  // of a source's
    uint32_t header_stride;
    uint32_t weight_stride;  // of a token's
    uint32_t row_stride;
    uint32_t flag_stride;

    uint32_t num_slots;
    uint32_t num_cells;
    uint32_t experts_per_rank;
    uint32_t absent_buffers;  // bits

    CROSSDOCK_HOST_DEVICE constexpr uint64_t buffer(uint32_t number) const { return buffers + number * buffer_bytes; }
};

struct LlArenaLayout {
    LlOffsets offsets;
    Region<uint64_t> barrier;  // [2][ranks]
    uint64_t bytes;

    static constexpr LlArenaLayout of(const LlGeometry& geometry) {
        LlArenaLayout layout{};
        LlOffsets& parts = layout.offsets;
        parts.count_stride = static_cast<uint32_t>(sizeof(uint64_t) * geometry.count_words_per_source());
        parts.header_stride = static_cast<uint32_t>(sizeof(TaggedWord) * geometry.header_words());
        parts.weight_stride = static_cast<uint32_t>(sizeof(TaggedWord) * geometry.weight_words());
        parts.row_stride = static_cast<uint32_t>(geometry.row_stride());
        // Reads of one line of the host's memory take turns.
        parts.flag_stride = geometry.is_in_host_memory ? 128 : sizeof(uint64_t);
        parts.num_slots = static_cast<uint32_t>(geometry.num_slots());
        parts.num_cells = static_cast<uint32_t>(geometry.num_cells());
        parts.experts_per_rank = geometry.experts_per_rank();
        parts.absent_buffers = ((1u << kNumBuffers) - 1) & ~((1u << geometry.num_buffers) - 1);

        Cursor buffer(128);
        buffer.take(parts.entries, geometry.num_ranks);
        buffer.take(parts.counts, geometry.num_ranks, parts.count_stride);
        buffer.take(parts.row_flags, geometry.num_rows(), parts.flag_stride);
        buffer.take(parts.headers, geometry.num_slots(), parts.header_stride);
        buffer.take(parts.weights, geometry.num_slots(), parts.weight_stride);
        buffer.take(parts.rows, geometry.num_rows(), geometry.row_stride());
        parts.buffer_bytes = buffer.end();

        Cursor arena(128);
        arena.take(parts.entered, geometry.num_ranks);
        arena.take(layout.barrier, uint64_t{2} * geometry.num_ranks);
        parts.buffers = align_up(arena.end(), 128);
        layout.bytes = parts.buffer(geometry.num_buffers);
        return layout;
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
    // free_from[epoch % 2][buffer] = E: a peer that has entered operation E has finished reading the buffer. Operation
    // `epoch` reads it, and the one before has written it.
    uint64_t free_from[2][kNumBuffers];
    uint64_t outbox_epoch;  // the latest operation that may fill the outbox; only in groups of several LSA teams
    uint32_t tickets;
    uint32_t blocks_done;       // only with masks
    uint32_t blocks_put;        // only in groups of several LSA teams, as the next
    uint32_t outboxes_emptied;  // during combines; only grows
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
    uint32_t verdict;     // of must_receive_again and is_last_to_put
    uint32_t is_refused;  // not 0: the group has failed before anything was received
    uint64_t alike;       // a combine in the host's memory: of await_ranks_of_block
    // With masks, of must_receive_again:
    uint32_t losses;   // counted before the latest masks were read
    uint32_t is_last;  // 1: this block has finished last

    CROSSDOCK_HOST_DEVICE static constexpr uint64_t bytes(uint32_t num_ranks) {
        return align_up(sizeof(LlBlockHead) + 8 * uint64_t{num_ranks}, 16);
    }
};

}  // namespace crossdock
