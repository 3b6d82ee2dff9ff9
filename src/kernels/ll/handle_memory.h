// SPDX-License-Identifier: Apache-2.0
// A handle's memory in LL: its pending operation, and what a combine needs from the dispatch before it. One description
// for hosts and kernels.
#pragma once

#include "kernels/ll/geometry.h"

namespace crossdock {

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
static_assert(sizeof(RowRecord) == 8, "a record's rows follow it (record_stride)");

// Where its parts are. LlPending comes first, then LlReceived [ranks] at kReceivedOffset.
struct LlHandleOffsets {
    Region<RowRecord> records;  // [ranks][tokens], record_stride bytes each
    Region<LlChoice> choices;   // [ranks][choices_of_source]
    Region<int32_t> own_rows;   // [tokens][topk], or [tokens]: OwnRow; the ids that were dispatched follow
    uint32_t record_stride;
    uint32_t choices_of_source;
};

struct LlHandleLayout {
    LlHandleOffsets offsets;
    Region<int32_t> dispatched_ids;  // [tokens][topk], -1: dropped
    Region<uint32_t> cells;  // with several LSA teams: [2][tokens][topk], of a token's choices, and of its ranks
    uint64_t bytes;

    static constexpr LlHandleLayout of(uint32_t num_ranks, uint32_t max_tokens, uint32_t topk, bool has_several_teams) {
        LlHandleLayout layout{};
        LlHandleOffsets& parts = layout.offsets;
        parts.record_stride = static_cast<uint32_t>(align_up(sizeof(RowRecord) + sizeof(int32_t) * topk, 16));
        parts.choices_of_source = max_tokens * topk;
        const uint64_t rows = uint64_t{num_ranks} * max_tokens;
        Cursor memory(16, kReceivedOffset + sizeof(LlReceived) * num_ranks);
        memory.take(parts.records, rows, parts.record_stride);
        memory.take(parts.choices, rows * topk);
        memory.align(alignof(int32_t));
        memory.take(parts.own_rows, parts.choices_of_source);
        memory.take(layout.dispatched_ids, parts.choices_of_source);
        if (has_several_teams) memory.take(layout.cells, uint64_t{2} * parts.choices_of_source);
        layout.bytes = memory.end();
        return layout;
    }
};

// The handle's send_only operation whose receive half is pending.
struct LlPending {
    uint64_t epoch;
    uint32_t buffer;
};
static_assert(sizeof(LlPending) <= kReceivedOffset, "it lies before what was received");

}  // namespace crossdock
