// SPDX-License-Identifier: Apache-2.0
// One LL operation of this rank: addresses in the arenas and in the handle's memory, the operation's beginning and end,
// its credits and waits.
#pragma once

#include "kernels/ll/arguments.h"
#include "kernels/remote.h"
#include "kernels/wait.h"

namespace crossdock {

inline constexpr uint32_t kDropped = ~uint32_t{0};  // a choice of no expert, so of no rank

// An operation that takes longer looks at the entries of all ranks while it waits for one. Many loads, one after the
// other, so that a short wait on a GPU had better do without.
inline constexpr uint64_t kPatienceNs = kLanes == 1 ? 0 : 10'000'000;

namespace {

// Row i of a source: its slot among all.
CROSSDOCK_DEVICE uint32_t slot_of(const auto& c, uint32_t source, uint32_t i) {
    return source * c.arena.max_tokens + i;
}
CROSSDOCK_DEVICE uint32_t cell_of(const auto& c, uint32_t token, uint32_t index) {
    return token * c.arena.cells_per_token + index;
}

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
// Whether a token has choices from `base` on: a warp reads them one per lane.
CROSSDOCK_DEVICE bool has_choices_from(const auto& c, uint32_t base) { return base < c.kMostTopk && base < c.topk; }

// A block's small tasks, one warp each: the last warps, since the first ones have most to count and to send.
enum class WarpRole : uint32_t {
    kLoader,   // loads rows into stages
    kClock,    // the clock, the block's ticket, the entry
    kStatus,   // free buffers, losses, the pending operation
    kCredits,  // the operations that peers have entered
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

inline constexpr uint32_t kNoBuffer = ~uint32_t{0};
// The first buffer that no pending operation holds, if possible not the previous operation's: so two buffers alternate,
// and their contents stay in caches. kNoBuffer: all are held.
CROSSDOCK_DEVICE uint32_t choose_buffer(const auto& c, const LlClock& clock) {
    const uint32_t free = ((1u << kNumBuffers) - 1) & ~(clock.held_buffers | c.offsets.absent_buffers);
    const uint32_t others = free & ~(1u << clock.latest_buffer);
    const uint32_t chosen = others != 0 ? others : free;
    return chosen != 0 ? number_of_ones((chosen & (0u - chosen)) - 1) : kNoBuffer;
}

CROSSDOCK_DEVICE uint64_t buffer_base(const auto& c, uint32_t buffer) { return c.offsets.buffer(buffer); }

// The blocks and warps that run the receive half: some blocks and the last `warps` warps of each; after a loss, all
// warps of the last block.
struct WorkShare {
    uint32_t block;  // num_blocks or more: this block has no share
    uint32_t num_blocks;
    uint32_t warps;

    // Counted from the last warp, since the first ones are the busiest senders. `warps` or more: this warp has no
    // share.
    CROSSDOCK_DEVICE uint32_t warp(const Ctx& ctx) const { return ctx.num_warps() - 1 - ctx.warp_idx(); }
    CROSSDOCK_DEVICE uint32_t thread(const Ctx& ctx) const { return warp(ctx) * kLanes + ctx.lane(); }
    CROSSDOCK_DEVICE uint32_t threads() const { return warps * kLanes; }
    CROSSDOCK_DEVICE bool has(const Ctx& ctx) const { return block < num_blocks && warp(ctx) < warps; }
    // Consecutive numbers are in different blocks, so that all blocks share even little work.
    CROSSDOCK_DEVICE uint32_t first(const Ctx& ctx) const { return warp(ctx) * num_blocks + block; }
    CROSSDOCK_DEVICE uint32_t step() const { return num_blocks * warps; }
    CROSSDOCK_DEVICE void sync(const Ctx& ctx) const { ctx.last_warps_sync(warps); }
};

// Records a number out of range. This rank itself is never masked.
CROSSDOCK_DEVICE_RARE void refuse_number(const Ctx& ctx, const auto& c, Operation operation, PeerNumber number,
                                         uint32_t peer, uint64_t most, uint64_t seen) {
    WaitScope scope = c.scope;
    if (peer == c.rank) scope.masking = 0;
    record_peer_fault(ctx, scope, operation, PeerFaultKind::kOutOfRange, number, peer, most, seen);
}

// Every buffer is held by a pending send_only operation: a usage error, not a lost peer.
CROSSDOCK_DEVICE_RARE void refuse_buffers(const Ctx& ctx, const auto& c, Operation operation, uint32_t held) {
    WaitScope scope = c.scope;
    scope.masking = 0;
    record_expired_wait(ctx, scope, operation, WaitStep::kBuffer, c.rank, 0, held);
}

// u64 [ranks]: the latest operation that this block has seen each peer enter, or kMasked.
CROSSDOCK_DEVICE uint64_t* entered_so_far(const Ctx& ctx) { return reinterpret_cast<uint64_t*>(&block_head(ctx) + 1); }
inline constexpr uint64_t kMasked = ~uint64_t{0};

CROSSDOCK_DEVICE void note_mask(const Ctx& ctx, const auto& c, uint32_t peer) {
    if (!is_active(ctx, c.scope, peer)) entered_so_far(ctx)[peer] = kMasked;
}

// With masks. Returns true if the receive half must run again. If a peer was lost during it, blocks may have used
// different masks; the block that finishes last then repeats the whole receive half alone, with the latest masks. That
// is so if any block began when fewer losses had been counted: the sum of what all have counted tells.
CROSSDOCK_DEVICE_RARE bool must_receive_again(const Ctx& ctx, const auto& c) {
    constexpr uint32_t kCountBits = 12;  // of blocks, more than a GPU runs; above them the sum, which may wrap around
    LlBlockHead& head = block_head(ctx);
    const auto num_blocks = ctx.num_blocks();
    const bool is_first_thread = thread_idx(ctx) == 0;
    const bool is_first_run = head.is_last == 0;
    ctx.block_sync();
    if (is_first_run) {
        if (is_first_thread) {
            const uint32_t own = 1 + (head.losses << kCountBits);
            const uint32_t sum = ctx.add_acq_rel_device(&c.state->blocks_done, own) + own;
            head.is_last = sum % (1u << kCountBits) == num_blocks ? 1 : 0;
            head.verdict = sum >> kCountBits;
        }
        ctx.block_sync();
        if (head.is_last == 0) return false;
    }
    if (is_first_thread) {
        const uint32_t losses = ctx.load_acquire_device(&c.scope.control->losses);
        const uint32_t missed = is_first_run ? num_blocks * losses - head.verdict : losses - head.losses;
        if (is_first_run) c.state->blocks_done = 0;
        head.verdict = missed << kCountBits != 0 ? 1 : 0;
        head.losses = losses;
    }
    ctx.block_sync();
    if (head.verdict == 0) return false;
    for_threads(ctx, c.arena.num_ranks, [&](uint32_t peer) { note_mask(ctx, c, peer); });
    ctx.block_sync();
    return true;
}

// `args` is what the kernel received, LlDispatchArgs or LlCombineArgs or one of their variants.
template <typename Args>
class LlOperation : public Operation {
  public:
    const Ctx& ctx;
    const Args& args;
    const decltype(Args::common)& c;

    CROSSDOCK_DEVICE LlOperation(const Ctx& of_kernel, const Args& of_call)
        : ctx(of_kernel), args(of_call), c(of_call.common) {}
    // The same operation in a separate function.
    CROSSDOCK_DEVICE LlOperation(const Ctx& of_kernel, const Args& of_call, const Operation& operation)
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
        return base + c.offsets.row_flags.offset + uint64_t{8} * row;
    }
    CROSSDOCK_DEVICE uint64_t header_offset(uint32_t slot) const {
        return base + c.offsets.headers.offset + uint64_t{slot} * c.offsets.header_stride;
    }
    CROSSDOCK_DEVICE uint64_t weights_offset(uint32_t source, uint32_t token) const {
        return base + c.offsets.weights.offset + uint64_t{slot_of(c, source, token)} * c.offsets.weight_stride;
    }
    // A slot or cell, in either form.
    CROSSDOCK_DEVICE uint64_t row_offset(uint32_t row) const {
        return base + c.offsets.rows.offset + uint64_t{row} * c.offsets.row_stride;
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

    // Reads what blocks need while earlier kernels are ending: different warps read, so that all loads overlap. Entered
    // words only grow; a failure that is missed here is found at the next wait; the previous operation has advanced the
    // clock before any block of this one began.
    CROSSDOCK_DEVICE void look_up() {
        LlBlockHead& head = block_head(ctx);
        if (has_role(ctx, WarpRole::kClock) && is_leader(ctx)) {
            head.clock = ctx.load_relaxed_system(&c.state->clock);
            // The ticket is taken after the clock is read: a bit that is never set makes it depend on the clock. Its
            // value is not needed here.
            const uint32_t none = static_cast<uint32_t>(head.clock >> 63);
            ticket_ = ctx.count_up_device(&c.state->tickets, blocks() + none);
            head.is_refused = 0;
        }
        if (has_role(ctx, WarpRole::kStatus)) {
            for_lanes(ctx, 2 * kNumBuffers,
                      [&](uint32_t i) { head.free_from[i] = ctx.load_relaxed_system(&c.state->free_from[0][0] + i); });
            if (is_leader(ctx)) head.has_failed = has_failed(ctx, c.scope) ? 1 : 0;
        }
        if (has_role(ctx, WarpRole::kCredits)) {
            for_lanes(ctx, c.arena.num_ranks, [&](uint32_t peer) {
                entered_so_far(ctx)[peer] = sends() ? ctx.load_acquire_system(entered_by(peer)) : 0;
            });
            // Before the masks.
            if (c.scope.masking != 0 && is_leader(ctx)) {
                head.losses = ctx.load_acquire_device(&c.scope.control->losses);
                head.is_last = 0;
            }
        }
        ctx.warp_sync();
    }

    // After earlier kernels have ended: tells every peer that this rank has entered this operation, and which of its
    // outputs (bits of DirectPart) they may write. Followed by a block barrier and begin.
    CROSSDOCK_DEVICE void enter(uint32_t direct) {
        LlBlockHead& head = block_head(ctx);
        if (has_role(ctx, WarpRole::kClock)) {
            if (sends() && ctx.block_idx() == ctx.num_blocks() - 1) announce_entry(LlClock::of(head.clock), direct);
            if (is_leader(ctx)) head.start_ns = ctx.now_ns();
        }
        if (!sends() && has_role(ctx, WarpRole::kStatus) && is_leader(ctx)) {
            head.pending_epoch = pending_of(c)->epoch;
            head.pending_buffer = pending_of(c)->buffer;
        }
        if (c.scope.masking != 0 && has_role(ctx, WarpRole::kCredits))
            for_lanes(ctx, c.arena.num_ranks, [&](uint32_t peer) { note_mask(ctx, c, peer); });
    }

    // Returns false if the group has failed, or if pending send_only operations hold all buffers (fails the group).
    CROSSDOCK_DEVICE bool begin() {
        const LlBlockHead& head = block_head(ctx);
        const LlClock clock = LlClock::of(head.clock);
        start_ns = head.start_ns;
        if (!sends()) {
            epoch = head.pending_epoch;
            buffer = head.pending_buffer;
        } else {
            epoch = clock.epoch;
            buffer = choose_buffer(c, clock);
            if (buffer != kNoBuffer) free_from = head.free_from[clock.epoch % 2 * kNumBuffers + buffer];
        }
        const bool has_ticket = has_role(ctx, WarpRole::kClock) && is_leader(ctx);
        const bool is_last = ticket_ + 1 == blocks();
        if (buffer == kNoBuffer) {
            if (has_ticket && is_last) refuse_buffers(ctx, c, *this, clock.held_buffers);
            return false;
        }
        base = buffer_base(c, buffer);
        if (has_ticket) {
            // The next kernel's blocks may read the clock once all blocks of this one have come here, so this block
            // waits for the clock's exchange to return.
            const bool is_advanced = !is_last || advance_clock(clock) != 0;
            // While this kernel waits for experts, the next one must not take the SMs that these need.
            if (is_advanced && !waits_for_experts(args)) ctx.let_next_kernel_start();
        }
        return head.has_failed == 0;
    }

    // For the receive half, without a load of global memory: whether the peer was active when this operation began or
    // the receive half was repeated. A send half asks is_active: a peer that was masked meanwhile lacks what it needs.
    CROSSDOCK_DEVICE bool is_active_here(uint32_t peer) const {
        if (c.scope.masking == 0 || entered_so_far(ctx)[peer] != kMasked) return true;
        ctx.note_unread_slots_allowed();
        return false;
    }
    // Waits until the peer has finished reading its buffer; called before the first write of an operation to a peer.
    CROSSDOCK_DEVICE bool wait_credit(uint32_t peer) const {
        if (!is_active(ctx, c.scope, peer)) return false;
        if (ctx.skips_credit() || peer == c.rank || entered_so_far(ctx)[peer] >= free_from) return true;
        return wait_for_credit(ctx, args, *this, peer);
    }
    // The same by a full warp.
    CROSSDOCK_DEVICE bool wait_credit_as_warp(uint32_t peer, bool asks = true) const {
        return ctx.warp_broadcast(asks && is_leader(ctx) && wait_credit(peer) ? 1u : 0u) != 0;
    }

    // The peer's entry. A later entry for the same buffer may overtake one that is put, which then overwrites it: the
    // later one's signal tells that it had arrived, and the entry counts as that of a later operation, whose sender has
    // accepted this rank's terms.
    CROSSDOCK_DEVICE TaggedWord load_entry_of(uint32_t peer) const {
        if constexpr (!kHasGinPeers) return load_entry(ctx, c.scope, *this, peer);
        const bool was_here = is_gin_peer(peer) && ctx.load_acquire_system(entered_by(peer)) >= epoch;
        TaggedWord entry = load_entry(ctx, c.scope, *this, peer);
        if (was_here && word_epoch(entry.tag) < epoch) entry.tag = pack_word(epoch + 1, 0);
        return entry;
    }
    CROSSDOCK_DEVICE bool is_alike(const TaggedWord& entry) const { return has_entered_alike(entry, c.scope, *this); }
    CROSSDOCK_DEVICE bool wait_entry(uint32_t peer, TaggedWord& entry) const {
        entry = load_entry_of(peer);
        if (is_alike(entry)) return true;
        const AwaitedEntry awaited = wait_for_entry(ctx, args, *this, peer);
        entry = awaited.entry;
        return awaited.came;
    }

    // Waits for a word of this operation.
    CROSSDOCK_DEVICE bool wait_word(WaitStep step, uint32_t peer, const uint64_t* word, uint64_t& payload) const {
        uint64_t seen = 0;
        const bool came = wait_until(
            ctx, c.scope, *this, step, peer, epoch,
            [&] {
                seen = ctx.load_acquire_system(word);
                return word_epoch(seen);
            },
            [&](uint64_t seen_epoch) { return seen_epoch == epoch; });
        payload = word_payload(seen);
        return came;
    }
    CROSSDOCK_DEVICE bool wait_tagged(WaitStep step, uint32_t peer, const TaggedWord* word, uint64_t& payload) const {
        TaggedWord seen{};
        const bool came = wait_until(
            ctx, c.scope, *this, step, peer, epoch,
            [&] {
                seen = ctx.load_tagged(word);
                return word_epoch(seen.tag);
            },
            [&](uint64_t seen_epoch) { return seen_epoch == epoch; });
        payload = seen.payload;
        return came;
    }
    CROSSDOCK_DEVICE bool is_of(const TaggedWord& word) const { return word_epoch(word.tag) == epoch; }

    // As may_go_on_waiting. Also fails the group, without masks, if any rank has entered this operation, or an earlier
    // one whose entries are still there, with other terms than this rank: the peer may have stopped because of another
    // rank, or in a combine that has ended here, since it waits only for ranks that have this rank's tokens. With
    // masks, a rank that was masked has done other things meanwhile.
    CROSSDOCK_DEVICE_RARE static bool may_await(const Ctx& ctx, const Args& args, Operation operation, WaitStep step,
                                                uint32_t peer, uint64_t seen) {
        const auto& c = args.common;
        const bool looks = c.scope.masking == 0 && ctx.now_ns() >= operation.start_ns + kPatienceNs;
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; looks && i < c.arena.num_buffers * c.arena.num_ranks; ++i) {
            const uint32_t rank = i % c.arena.num_ranks;
            Operation in_buffer = operation;
            in_buffer.base = buffer_base(c, i / c.arena.num_ranks);
            const TaggedWord own = load_entry(ctx, c.scope, in_buffer, c.rank);
            const TaggedWord other = load_entry(ctx, c.scope, in_buffer, rank);
            in_buffer.epoch = word_epoch(own.tag);
            if (word_epoch(other.tag) != in_buffer.epoch || WindowTerm::are_alike(other.payload, own.payload) ||
                !Entry::is_whole(own) || !Entry::is_whole(other))
                continue;
            const bool is_of_windows = WindowTerm::only_windows_differ(other.payload, own.payload);
            record_peer_fault(ctx, c.scope, in_buffer, PeerFaultKind::kDisagrees,
                              is_of_windows ? PeerNumber::kWindows : PeerNumber::kNone, rank, own.payload,
                              other.payload);
            return false;
        }
        return may_go_on_waiting(ctx, c.scope, operation, step, peer, operation.epoch, seen);
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

    // Runs receive(share, is_first) with this block's share, and again if needed (must_receive_again).
    template <typename Receive>
    CROSSDOCK_DEVICE void receive_for_good(bool runs, Receive receive) const {
        if (cancels()) ctx.note_unread_slots_allowed();
        if (!receives()) return;
        CROSSDOCK_ROLLED
        for (;;) {
            const bool is_first = c.scope.masking == 0 || block_head(ctx).is_last == 0;
            const WorkShare share = is_first ? first_share() : WorkShare{0, 1, warps()};
            if (runs && share.has(ctx)) receive(share, is_first);
            if (c.scope.masking == 0) return;
            // Rows of this run that land late must not overwrite those of the next run.
            if (is_leader(ctx)) {
                RowStage::wait_stores(ctx);
                ctx.fence_async_copies();
            }
            if (!must_receive_again(ctx, c) || !runs) return;
        }
    }
    // This block's share. If the first blocks only send, their number wraps around, and WorkShare::has is false.
    CROSSDOCK_DEVICE WorkShare first_share() const {
        return {block() - (blocks() - c.receive_blocks), c.receive_blocks, c.warp_layout.receive_warps};
    }

  private:
    // Waits that do not succeed at once, kept out of the code that runs every time.
    CROSSDOCK_DEVICE_RARE static bool wait_for_credit(const Ctx& ctx, const Args& args, Operation operation,
                                                      uint32_t peer) {
        const LlOperation op(ctx, args, operation);
        const uint64_t* word = op.entered_by(peer);
        return wait_until(
            ctx, op.c.scope, op, WaitStep::kCredit, peer, op.free_from, [&] { return ctx.load_acquire_system(word); },
            [&](uint64_t entered) { return entered >= op.free_from; });
    }
    struct AwaitedEntry {
        TaggedWord entry;
        bool came;
    };
    CROSSDOCK_DEVICE_RARE static AwaitedEntry wait_for_entry(const Ctx& ctx, const Args& args, Operation operation,
                                                             uint32_t peer) {
        const LlOperation op(ctx, args, operation);
        AwaitedEntry awaited{};
        awaited.came = poll_until(
            ctx,
            [&] {
                awaited.entry = op.load_entry_of(peer);
                return word_epoch(awaited.entry.tag);
            },
            [&](uint64_t) { return op.is_alike(awaited.entry); },
            [&](uint64_t seen) { return may_await(ctx, args, operation, WaitStep::kEntry, peer, seen); });
        return awaited;
    }

    CROSSDOCK_DEVICE uint64_t* entered_word(uint32_t owner, uint32_t writer) const {
        return c.peers.at(owner, c.offsets.entered) + writer;
    }
    // Where this rank sees what the peer has entered.
    CROSSDOCK_DEVICE const uint64_t* entered_by(uint32_t peer) const {
        return is_gin_peer(peer) ? signal_word(c.reach, Signal::kEntered, peer) : entered_word(c.rank, peer);
    }

    // One warp. Publishes this rank's terms and epoch to every peer, which releases all buffers that it has finished
    // reading (not those held by pending operations).
    CROSSDOCK_DEVICE void announce_entry(const LlClock& clock, uint32_t direct) const {
        const uint32_t chosen = choose_buffer(c, clock);
        if (chosen == kNoBuffer) return;
        const uint64_t entry = buffer_base(c, chosen) + c.offsets.entries.offset + sizeof(TaggedWord) * c.rank;
        const uint64_t tag = Entry::tag(clock.epoch, c.scope.terms, direct);
        const auto store = [&](uint32_t peer) {
            ctx.store_tagged(reinterpret_cast<TaggedWord*>(at(peer, entry)), c.scope.terms, tag);
        };
        if constexpr (kHasGinPeers) {
            // GIN peers get a copy of this rank's own entry.
            if (is_leader(ctx)) store(c.rank);
            ctx.fence_system();
            ctx.warp_sync();
        }
        for_lanes(ctx, c.arena.num_ranks, [&](uint32_t peer) {
            if (!is_active(ctx, c.scope, peer)) return;
            if (is_gin_peer(peer)) {
                put_and_raise(ctx, c.reach, peer, entry, entry, sizeof(TaggedWord),
                              raise_of(c.reach, Signal::kEntered, peer, clock.epoch));
                return;
            }
            store(peer);
            ctx.store_entered_system(entered_word(peer, c.rank), clock.epoch);
        });
        ctx.warp_sync();
    }

    // The thread with the last ticket. Writes the clock of the next operation, and the epochs from which each buffer
    // may be written again. Returns the previous clock.
    CROSSDOCK_DEVICE uint64_t advance_clock(LlClock clock) const {
        const uint64_t* current = block_head(ctx).free_from + clock.epoch % 2 * kNumBuffers;
        const uint32_t bit = 1u << buffer;
        if (!sends()) {
            clock.held_buffers &= ~bit;
            ctx.store_for_later(&c.state->free_from[clock.epoch % 2][buffer], clock.epoch);
        } else {
            ++clock.epoch;
            clock.latest_buffer = buffer;
            uint64_t* next = c.state->free_from[clock.epoch % 2];
            CROSSDOCK_ROLLED
            for (uint32_t i = 0; i < kNumBuffers; ++i) ctx.store_for_later(next + i, current[i]);
            if ((c.halves & kReceiveHalf) == 0) {
                clock.held_buffers |= bit;
                *pending_of(c) = {epoch, buffer};
            } else {
                ctx.store_for_later(next + buffer, clock.epoch);
            }
        }
        return ctx.exchange_release_device(&c.state->clock, clock.word());
    }

    uint32_t ticket_ = 0;  // the block's, in the leader of WarpRole::kClock
};

// Runs an operation, as much of it as possible before epoch and buffer are known:
// 1. init: what needs no data of earlier kernels.
// 2. fetch: loads what they have written. enter: announces this operation to peers.
// 3. prepare, before the block barrier: completes what was loaded.
// 4. begin: epoch and buffer are known, or the operation does not run. The send half's run calls it once all loads that
//    need neither are issued, and then sends; look_ahead prefetches for the receive half.
// 5. The receive half.
CROSSDOCK_DEVICE void run_operation(auto& op, uint32_t direct, auto& send, auto& receive) {
    const Ctx& ctx = op.ctx;
    ctx.mark(send.kSteps.begin);
    send.init();
    op.look_up();
    ctx.wait_for_previous_kernels();
    ctx.mark(send.kSteps.ready);
    receive.fetch();
    if (op.sends()) send.fetch();
    op.enter(direct);
    if (op.sends()) send.prepare();
    ctx.block_sync();
    const auto begin = [&] {
        const bool runs = op.begin();
        ctx.mark(send.kSteps.head);
        if (runs) receive.look_ahead();
        return runs;
    };
    const bool runs = op.sends() ? send.run(begin) : begin();
    if (runs && op.cancels()) await_stragglers(op);
    op.receive_for_good(runs, [&](const WorkShare& share, bool is_first) { receive.run(share, is_first); });
    ctx.mark(send.kSteps.end);
}

}  // namespace
}  // namespace crossdock
