// SPDX-License-Identifier: Apache-2.0
// Where an LL operation's data are: its routing, the handle's memory, a block's shared memory, and the operation's
// buffer in every rank's arena.
#pragma once

#include <type_traits>

#include "device/row_stage.h"
#include "kernels/ll/arguments.h"
#include "kernels/remote.h"
#include "kernels/wait.h"

namespace crossdock {

inline constexpr uint32_t kDropped = ~uint32_t{0};  // a choice of no expert, so of no rank

namespace {

// Row i of a source: its slot among all.
CROSSDOCK_DEVICE uint32_t slot_of(const auto& c, uint32_t source, uint32_t i) {
    return source * c.arena.max_tokens + i;
}
CROSSDOCK_DEVICE uint32_t cell_of(const auto& c, uint32_t token, uint32_t index) {
    return token * c.arena.cells_per_token + index;
}

// A row's header: its origin, choices and, with several LSA teams, ReturnCells.
CROSSDOCK_DEVICE uint32_t header_words(const auto& c) { return 1 + c.topk + (kHasGinPeers ? 1 : 0); }

// In the handle's memory.
CROSSDOCK_DEVICE LlPending* pending_of(const auto& c) { return reinterpret_cast<LlPending*>(c.handle_memory); }
CROSSDOCK_DEVICE LlReceived* received_from(const auto& c, uint32_t source) {
    return reinterpret_cast<LlReceived*>(c.handle_memory + kReceivedOffset) + source;
}
CROSSDOCK_DEVICE RowRecord* row_record(const auto& c, uint32_t source, uint32_t i) {
    return reinterpret_cast<RowRecord*>(c.handle_memory + c.handle.records.offset +
                                        uint64_t{slot_of(c, source, i)} * c.handle.record_stride);
}
CROSSDOCK_DEVICE LlChoice* choice_of(const auto& c, uint32_t source, uint32_t i) {
    return c.handle.choices.in(c.handle_memory) + source * c.handle.choices_of_source + i;
}
CROSSDOCK_DEVICE int32_t* own_row(const auto& c, uint32_t token, uint32_t k) {
    int32_t* rows = c.handle.own_rows.in(c.handle_memory);
    return rows + (c.expert_major ? uint64_t{token} * c.topk + k : uint64_t{token});
}
// Expert-major: the expert id that was dispatched, for who asks after the caller's have changed.
CROSSDOCK_DEVICE int32_t* dispatched_id(const auto& c, uint32_t token, uint32_t k) {
    return own_row(c, token, k) + c.handle.choices_of_source;
}
// With several LSA teams: the cell of the row of a token's k-th choice or, if one row per rank returns, of its k-th
// rank.
CROSSDOCK_DEVICE uint32_t* returned_cell(const auto& c, bool per_choice, uint32_t token, uint32_t k) {
    uint32_t* cells = c.cells.in(c.handle_memory) + (per_choice ? 0 : c.handle.choices_of_source);
    return cells + uint64_t{token} * c.topk + k;
}
// Groups of several LSA teams have no elastic operations.
CROSSDOCK_DEVICE bool is_elastic(const auto& args) {
    if constexpr (kHasGinPeers) return false;
    return args.is_elastic;
}
// Beside experts' kernels (kernels/ll/overlap.h). Kernels for other frequent cases neither publish nor wait.
CROSSDOCK_DEVICE bool publishes_rows(const auto& args) {
    if constexpr (!std::remove_cvref_t<decltype(args)>::kMayOverlap) return false;
    return args.common.overlap.memory != nullptr;
}
CROSSDOCK_DEVICE bool waits_for_experts(const auto& args) {
    if constexpr (!std::remove_cvref_t<decltype(args)>::kMayOverlap) return false;
    return args.common.overlap.done_value != 0;
}

// What a dispatch sends of a row: bytes of its scales, and all bytes.
CROSSDOCK_DEVICE uint32_t scale_area(const auto& args) { return static_cast<uint32_t>(align_up(args.scale_bytes, 16)); }
CROSSDOCK_DEVICE uint32_t bytes_with_scales(const auto& args) { return args.row_bytes + scale_area(args); }

// The most rows that this rank's experts may have.
CROSSDOCK_DEVICE uint32_t num_rows_here(const auto& args) {
    const auto& c = args.common;
    if (is_elastic(args)) return args.elastic.rows;
    return c.offsets.num_slots * (c.expert_major ? c.offsets.experts_per_rank : 1);
}

// A choice as the caller passed it.
CROSSDOCK_DEVICE int64_t given_id(const auto& c, uint32_t token, uint32_t k) {
    const uint64_t at = uint64_t{token} * c.topk + k;
    return c.ids_are_64_bit ? static_cast<const int64_t*>(c.topk_idx)[at] : static_cast<const int32_t*>(c.topk_idx)[at];
}
// Its global expert id; an invalid id is dropped.
CROSSDOCK_DEVICE uint32_t expert_of(const auto& c, int64_t given) {
    return static_cast<uint64_t>(given) < c.arena.num_experts ? static_cast<uint32_t>(given) : kDropped;
}
CROSSDOCK_DEVICE uint32_t expert_id(const auto& c, uint32_t token, uint32_t k) {
    return expert_of(c, given_id(c, token, k));
}
CROSSDOCK_DEVICE uint32_t rank_of_expert(const auto& c, uint32_t id) {
    if (id == kDropped) return kDropped;
    return static_cast<uint32_t>(uint64_t{id} * c.rank_of_expert_mult >> kRankOfExpertShift);
}
// Whether no earlier choice of the token goes to the rank.
CROSSDOCK_DEVICE bool is_first_of_rank(const auto& c, uint32_t token, uint32_t k, uint32_t rank) {
    CROSSDOCK_ROLLED
    for (uint32_t i = 0; i < k; ++i) {
        if (rank_of_expert(c, expert_id(c, token, i)) == rank) return false;
    }
    return true;
}
// Whether no choice of the token before its k-th names the expert.
CROSSDOCK_DEVICE bool is_first_of_expert(const auto& c, uint32_t token, uint32_t k, uint32_t expert) {
    CROSSDOCK_ROLLED
    for (uint32_t i = 0; i < k; ++i) {
        if (expert_id(c, token, i) == expert) return false;
    }
    return true;
}
// Whether a token has choices from `base` on: a warp reads them one per lane.
CROSSDOCK_DEVICE bool has_choices_from(const auto& c, uint32_t base) { return base < c.kMostTopk && base < c.topk; }

// A block's small tasks, one warp each: the last warps, since the first ones have most to count and to send.
enum class WarpRole : uint32_t {
    kLoader,   // loads rows into stages
    kClock,    // the clock, the block's ticket, the entry
    kStatus,   // free buffers, the group's failure, the pending operation
    kCredits,  // the operations that peers have entered; with masks, losses
};

CROSSDOCK_DEVICE bool has_role(const Ctx& ctx, WarpRole role) {
    const uint32_t from_last = static_cast<uint32_t>(role);
    return ctx.warp_idx() == (ctx.num_warps() > from_last + 1 ? ctx.num_warps() - 1 - from_last : 0);
}

CROSSDOCK_DEVICE LlBlockHead& block_head(const Ctx& ctx) {
    return *reinterpret_cast<LlBlockHead*>(ctx.shared_memory());
}

// Dispatch: stages for rows to send come first, then those for received rows.
CROSSDOCK_DEVICE RowStage stage_of(const Ctx& ctx, const auto& shared, uint32_t stage) {
    return RowStage(shared.stages.in(ctx.shared_memory()) + uint64_t{shared.stage_bytes} * stage);
}

// u64 [ranks]: the latest operation that this block has seen each peer enter, or kMasked.
CROSSDOCK_DEVICE uint64_t* entered_so_far(const Ctx& ctx) { return reinterpret_cast<uint64_t*>(&block_head(ctx) + 1); }
inline constexpr uint64_t kMasked = ~uint64_t{0};

CROSSDOCK_DEVICE uint64_t buffer_base(const auto& c, uint32_t buffer) { return c.offsets.buffer(buffer); }

// Records a number out of range. This rank itself is never masked.
CROSSDOCK_DEVICE_RARE void refuse_number(const Ctx& ctx, const auto& c, Operation operation, PeerNumber number,
                                         uint32_t peer, uint64_t most, uint64_t seen) {
    WaitScope scope = c.scope;
    if (peer == c.rank) scope.masking = 0;
    record_peer_fault(ctx, scope, operation, PeerFaultKind::kOutOfRange, number, peer, most, seen);
}

// One operation of this rank, as a kernel sees it: the thread's place, the operation's halves, and addresses. `args` is
// what the kernel received, LlDispatchArgs or LlCombineArgs or one of their variants.
template <typename Args>
class LlPeers : public Operation {
  public:
    const Ctx& ctx;
    const Args& args;
    const decltype(Args::common)& c;
    static constexpr bool kIsDispatch = requires(const Args& dispatch) { dispatch.scale_bytes; };

    CROSSDOCK_DEVICE LlPeers(const Ctx& of_kernel, const Args& of_call)
        : ctx(of_kernel), args(of_call), c(of_call.common) {}
    // The same operation in a separate function.
    CROSSDOCK_DEVICE LlPeers(const Ctx& of_kernel, const Args& of_call, const Operation& operation)
        : Operation(operation), ctx(of_kernel), args(of_call), c(of_call.common) {}

    // This thread's place.
    CROSSDOCK_DEVICE uint32_t lane() const { return ctx.lane(); }
    CROSSDOCK_DEVICE uint32_t warp() const { return ctx.warp_idx(); }
    CROSSDOCK_DEVICE uint32_t warps() const { return ctx.num_warps(); }
    CROSSDOCK_DEVICE uint32_t thread() const { return thread_idx(ctx); }
    CROSSDOCK_DEVICE uint32_t threads() const { return num_threads(ctx); }
    CROSSDOCK_DEVICE uint32_t block() const { return ctx.block_idx(); }
    CROSSDOCK_DEVICE uint32_t blocks() const { return ctx.num_blocks(); }

    CROSSDOCK_DEVICE bool sends() const { return (c.halves & kSendHalf) != 0; }
    CROSSDOCK_DEVICE bool receives() const { return (c.halves & (kReceiveHalf | kCancel)) == kReceiveHalf; }
    CROSSDOCK_DEVICE bool cancels() const { return (c.halves & kCancel) != 0; }
    CROSSDOCK_DEVICE bool own_rows_are_ll128() const {
        if constexpr (kHasGinPeers) return false;  // nor are those of other ranks
        if (c.kForm != LlForm::kEither) return c.kForm == LlForm::kLl128;
        return c.own_rows_are_ll128;
    }
    CROSSDOCK_DEVICE bool is_gin_peer(uint32_t peer) const { return is_remote(c.reach, peer); }

    // Offsets in every rank's arena, in this operation's buffer, in bytes.
    CROSSDOCK_DEVICE uint64_t counts_offset(uint32_t source) const {
        return base + c.offsets.counts.offset + source * c.offsets.count_stride;
    }
    CROSSDOCK_DEVICE uint64_t flag_offset(uint32_t row) const {
        return base + c.offsets.row_flags.offset + uint64_t{row} * c.offsets.flag_stride;
    }
    CROSSDOCK_DEVICE uint64_t header_offset(uint32_t slot) const {
        return base + c.offsets.headers.offset + uint64_t{slot} * c.offsets.header_stride;
    }
    CROSSDOCK_DEVICE uint64_t weights_offset(uint32_t source, uint32_t token) const {
        return base + c.offsets.weights.offset + uint64_t{slot_of(c, source, token)} * c.offsets.weight_stride;
    }
    // A slot or cell, and the row in it, in either form.
    CROSSDOCK_DEVICE uint64_t slot_offset(uint32_t row) const {
        // A source's slots begin at the same place in all operations, so that late puts of a masked one meet no others.
        const uint32_t first = kHasGinPeers && kIsDispatch ? row / c.arena.max_tokens * c.arena.max_tokens : 0;
        return base + c.offsets.rows.offset + uint64_t{first} * c.offsets.row_stride +
               uint64_t{row - first} * row_stride();
    }
    CROSSDOCK_DEVICE uint64_t row_offset(uint32_t row) const { return slot_offset(row) + row_front(); }
    // With several LSA teams, a row for a GIN peer follows its header, or its cell's flag.
    CROSSDOCK_DEVICE uint32_t row_front() const {
        if constexpr (!kHasGinPeers) return 0;
        return kIsDispatch ? c.offsets.header_stride : kCellFront;
    }
    // From one slot of a source, or one cell, to the next. With several LSA teams they have no gaps.
    CROSSDOCK_DEVICE uint32_t row_stride() const {
        if constexpr (!kHasGinPeers) {
            return c.offsets.row_stride;
        } else if constexpr (kIsDispatch) {
            return row_front() + bytes_with_scales(args);
        } else {
            return row_front() + args.wire_bytes;
        }
    }

    // The same as addresses in the arenas of this rank and LSA peers.
    CROSSDOCK_DEVICE std::byte* at(uint32_t owner, uint64_t offset) const { return c.peers.at(owner, offset); }
    CROSSDOCK_DEVICE uint64_t* counts(uint32_t owner, uint32_t source) const {
        return reinterpret_cast<uint64_t*>(at(owner, counts_offset(source)));
    }
    CROSSDOCK_DEVICE uint64_t* flag(uint32_t owner, uint32_t row) const {
        return reinterpret_cast<uint64_t*>(at(owner, flag_offset(row)));
    }
    CROSSDOCK_DEVICE TaggedWord* header(uint32_t owner, uint32_t slot) const {
        return reinterpret_cast<TaggedWord*>(at(owner, header_offset(slot)));
    }
    CROSSDOCK_DEVICE TaggedWord* weights(uint32_t owner, uint32_t source, uint32_t token) const {
        return reinterpret_cast<TaggedWord*>(at(owner, weights_offset(source, token)));
    }
    CROSSDOCK_DEVICE std::byte* row(uint32_t owner, uint32_t row) const { return at(owner, row_offset(row)); }
    // Where this rank finds a row's header.
    CROSSDOCK_DEVICE const TaggedWord* header_from(uint32_t source, uint32_t slot) const {
        if (!is_gin_peer(source)) return header(c.rank, slot);
        return reinterpret_cast<const TaggedWord*>(row(c.rank, slot) - row_front());
    }

    // At the owner, this rank or an LSA peer: the latest operation that the writer has entered.
    CROSSDOCK_DEVICE uint64_t* entered_word(uint32_t owner, uint32_t writer) const {
        return c.peers.at(owner, c.offsets.entered) + writer;
    }
    // Where this rank sees what the peer has entered.
    CROSSDOCK_DEVICE const uint64_t* entered_by(uint32_t peer) const {
        return is_gin_peer(peer) ? signal_word(c.reach, Signal::kEntered, peer) : entered_word(c.rank, peer);
    }

    // Checks that a number of the peer is at most `most`. Returns false if the peer's data must not be used.
    CROSSDOCK_DEVICE bool expect(PeerNumber number, uint32_t peer, uint64_t most, uint64_t seen) const {
        if (seen <= most) return true;
        refuse_number(ctx, c, *this, number, peer, most, seen);
        return false;
    }

    // For the protocol checker: this rank begins to write a row (a slot or cell) at the owner, or has read one.
    CROSSDOCK_DEVICE void note_written(uint32_t owner, uint32_t row) const {
        const std::byte* arena = is_gin_peer(owner) ? c.reach.network.memory.at(owner, 0) : at(owner, 0);
        ctx.note_slot_written(c.rank, owner, arena, buffer, row, epoch);
    }
    CROSSDOCK_DEVICE void note_read(uint32_t row) const {
        ctx.note_slot_read(c.rank, at(c.rank, 0), buffer, row, epoch);
    }
};

}  // namespace
}  // namespace crossdock
