// SPDX-License-Identifier: Apache-2.0
// What dispatch and combine share: where things are in the arenas, how an operation begins and ends, credits.
#pragma once

#include "kernels/ll/arguments.h"
#include "kernels/remote.h"

namespace crossdock {

inline namespace CROSSDOCK_VARIANT {

CROSSDOCK_DEVICE std::byte* in_buffer(const auto& c, const Operation& operation, int owner, uint64_t offset) {
    return c.peers.at(owner, operation.base + offset);
}
CROSSDOCK_DEVICE uint64_t* count_words(const auto& c, const Operation& operation, int owner, int source) {
    return reinterpret_cast<uint64_t*>(in_buffer(c, operation, owner, c.offsets.counts) +
                                       static_cast<uint32_t>(source) * c.offsets.count_stride);
}
CROSSDOCK_DEVICE uint64_t* row_flag(const auto& c, const Operation& operation, int owner, uint32_t row) {
    return reinterpret_cast<uint64_t*>(in_buffer(c, operation, owner, c.offsets.row_flags)) + row;
}
CROSSDOCK_DEVICE TaggedWord* header_words(const auto& c, const Operation& operation, int owner, uint32_t slot) {
    return reinterpret_cast<TaggedWord*>(in_buffer(c, operation, owner, c.offsets.headers) +
                                         uint64_t{slot} * c.offsets.header_stride);
}
CROSSDOCK_DEVICE TaggedWord* weight_words(const auto& c, const Operation& operation, int owner, int source,
                                          uint32_t token) {
    const uint32_t at = static_cast<uint32_t>(source) * c.arena.max_tokens + token;
    return reinterpret_cast<TaggedWord*>(in_buffer(c, operation, owner, c.offsets.weights) +
                                         uint64_t{at} * c.offsets.weight_stride);
}
// A slot or cell, in either form.
CROSSDOCK_DEVICE std::byte* row_at(const auto& c, const Operation& operation, int owner, uint32_t row) {
    return in_buffer(c, operation, owner, c.offsets.rows) + uint64_t{row} * c.offsets.row_stride;
}
CROSSDOCK_DEVICE uint32_t slot_of(const auto& c, int source, uint32_t i) {
    return static_cast<uint32_t>(source) * c.arena.max_tokens + i;
}
CROSSDOCK_DEVICE uint32_t cell_index(const auto& c, uint32_t token, uint32_t place) {
    return token * c.arena.cells_per_token + place;
}

// For the protocol's checker, where an arena begins.
CROSSDOCK_DEVICE const std::byte* arena_of(const auto& c, int owner) {
    return is_remote(c.reach, owner) ? c.reach.network.memory.at(owner, 0) : c.peers.at(owner, 0);
}

CROSSDOCK_DEVICE LlPending* pending_of(const auto& c) { return reinterpret_cast<LlPending*>(c.handle_memory); }
CROSSDOCK_DEVICE LlReceived* received_from(const auto& c, int source) {
    return reinterpret_cast<LlReceived*>(c.handle_memory + kReceivedOffset) + source;
}
CROSSDOCK_DEVICE RowRecord* row_record(const auto& c, int source, uint32_t i) {
    return reinterpret_cast<RowRecord*>(c.handle_memory + c.handle.records +
                                        uint64_t{slot_of(c, source, i)} * c.handle.record_stride);
}
CROSSDOCK_DEVICE LlChoice* choice_of(const auto& c, int source, uint32_t i) {
    return reinterpret_cast<LlChoice*>(c.handle_memory + c.handle.choices) +
           static_cast<uint32_t>(source) * c.handle.choices_of_source + i;
}

// A choice as the caller gave it.
CROSSDOCK_DEVICE int64_t given_id(const auto& c, uint32_t token_idx, uint32_t k) {
    const uint64_t at = uint64_t{token_idx} * c.topk + k;
    return c.ids_are_64_bit ? static_cast<const int64_t*>(c.topk_idx)[at] : static_cast<const int32_t*>(c.topk_idx)[at];
}
// Its global expert id, -1 where it is dropped: negative, or not an expert.
CROSSDOCK_DEVICE int32_t expert_of(const auto& c, int64_t given) {
    return static_cast<uint64_t>(given) < c.arena.num_experts ? static_cast<int32_t>(given) : -1;
}
CROSSDOCK_DEVICE int32_t expert_id(const auto& c, uint32_t token_idx, uint32_t k) {
    return expert_of(c, given_id(c, token_idx, k));
}
CROSSDOCK_DEVICE int rank_of_expert(const auto& c, int32_t id) {
    if (id < 0) return -1;
    return static_cast<int>(uint64_t{static_cast<uint32_t>(id)} * c.rank_of_expert_mult >> kRankOfExpertShift);
}

// No earlier choice of the token goes to that rank.
CROSSDOCK_DEVICE bool is_first_of_rank(const auto& c, uint32_t token, uint32_t k, int rank) {
    CROSSDOCK_ROLLED
    for (uint32_t i = 0; i < k; ++i) {
        if (rank_of_expert(c, expert_id(c, token, i)) == rank) return false;
    }
    return true;
}

// A warp looks at a token's choices, a lane at one, from `base` on.
CROSSDOCK_DEVICE bool has_choices_from(const auto& c, uint32_t base) { return base < c.kMostTopk && base < c.topk; }

// This rank's own rows go in line form.
CROSSDOCK_DEVICE bool sends_in_lines(const auto& c) {
    if (c.kForm != LlForm::kEither) return c.kForm == LlForm::kLines;
    return c.num_tokens <= c.line_tokens;
}

CROSSDOCK_DEVICE LlBlockHead* ll_block_head(const Ctx& ctx) {
    return reinterpret_cast<LlBlockHead*>(ctx.shared_memory());
}
CROSSDOCK_DEVICE uint64_t* seen_entered(const Ctx& ctx) { return reinterpret_cast<uint64_t*>(ll_block_head(ctx) + 1); }

CROSSDOCK_DEVICE uint64_t* entered_word(const auto& c, int owner, int writer) {
    return reinterpret_cast<uint64_t*>(c.peers.at(owner, c.offsets.entered)) + writer;
}
// Where this rank sees what the peer has entered.
CROSSDOCK_DEVICE const uint64_t* entered_by(const auto& c, int peer) {
    return is_remote(c.reach, peer) ? signal_word(c.reach, Signal::kEntered, peer) : entered_word(c, c.rank, peer);
}

// The warp that has the n-th of several small duties: the last warps, since the first ones have most to count and send.
CROSSDOCK_DEVICE bool has_duty(const Ctx& ctx, int n) {
    const int warp = ctx.num_warps() - 1 - n;
    return ctx.warp_idx() == (warp > 0 ? warp : 0);
}

// The first buffer that no pending operation holds and that the operation before did not use, if there is one: so two
// take turns, and what goes through them stays in caches. -1: all are held.
CROSSDOCK_DEVICE int choose_buffer(const auto& c, const LlClock& clock) {
    const uint32_t free = ((1u << kNumBuffers) - 1) & ~(clock.held_buffers | c.offsets.absent_buffers);
    const uint32_t others = free & ~(1u << clock.latest_buffer);
    const uint32_t chosen = others != 0 ? others : free;
    return chosen != 0 ? number_of_ones((chosen & (0u - chosen)) - 1) : -1;
}

CROSSDOCK_DEVICE uint64_t buffer_base(const auto& c, int buffer) {
    return c.offsets.buffers + static_cast<uint32_t>(buffer) * c.offsets.buffer_bytes;
}

// Tells every peer that this rank has come to this operation: with which terms; that whatever it read in earlier ones,
// held buffers excepted, may be overwritten; and that peers may write these parts (bits of DirectPart) of its outputs.
// One warp.
CROSSDOCK_DEVICE void announce_entry(const Ctx& ctx, const auto& c, const LlClock& clock, uint32_t direct) {
    const int buffer = choose_buffer(c, clock);
    if (buffer < 0) return;
    const uint64_t entry =
        buffer_base(c, buffer) + c.offsets.entries + sizeof(TaggedWord) * static_cast<uint32_t>(c.rank);
    const uint64_t tag = Entry::tag(clock.epoch, c.scope.terms, direct);
    const auto store = [&](int peer) {
        ctx.store_tagged(reinterpret_cast<TaggedWord*>(c.peers.at(peer, entry)), c.scope.terms, tag);
    };
    if constexpr (kHasGinPeers) {
        // Peers elsewhere get a copy of the own one.
        if (is_leader(ctx)) store(c.rank);
        ctx.fence_system();
        ctx.warp_sync();
    }
    CROSSDOCK_ROLLED
    for (int peer = ctx.lane(); peer < static_cast<int>(c.arena.num_ranks); peer += kLanes) {
        if (!is_active(ctx, c.scope, peer)) continue;
        if (is_remote(c.reach, peer)) {
            put_and_raise(ctx, c.reach, peer, entry, entry, sizeof(TaggedWord),
                          raise_of(c.reach, Signal::kEntered, peer, clock.epoch));
            continue;
        }
        store(peer);
        ctx.store_entered_system(entered_word(c, peer, c.rank), clock.epoch);
    }
    ctx.warp_sync();
}

// What a block must know before it does anything, as far as that may be looked up while earlier kernels are ending:
// different warps ask, so that all answers come at once. Entered words only grow, and who misses a failure or a loss of
// these last moments meets it where it waits; the operation before has advanced the clock before any block of this one
// could begin. Returns the block's ticket, to the first thread of duty 1.
CROSSDOCK_DEVICE uint32_t load_early_head(const Ctx& ctx, const auto& c) {
    LlBlockHead* head = ll_block_head(ctx);
    uint32_t ticket = 0;
    if (has_duty(ctx, 1) && is_leader(ctx)) {
        head->clock = ctx.load_relaxed_system(&c.state->clock);
        // Behind the clock: the bit that is never set makes one wait for the other. Nobody waits for the answer here.
        const uint32_t none = static_cast<uint32_t>(head->clock >> 63);
        ticket = ctx.count_up_device(&c.state->tickets, static_cast<uint32_t>(ctx.num_blocks()) + none);
        head->is_refused = 0;
    }
    if (has_duty(ctx, 2)) {
        CROSSDOCK_ROLLED
        for (int i = ctx.lane(); i < 2 * kNumBuffers; i += kLanes) {
            head->free_from[i] = ctx.load_relaxed_system(&c.state->free_from[0][0] + i);
        }
        if (is_leader(ctx)) {
            const bool failed = has_failed(ctx, c.scope);  // looked up together with the losses
            const uint32_t losses = ctx.load_relaxed_device(&c.scope.control->losses);
            head->has_failed = failed ? 1 : 0;
            head->losses = losses;
        }
    }
    CROSSDOCK_ROLLED
    for (int peer = ctx.lane(); has_duty(ctx, 3) && peer < static_cast<int>(c.arena.num_ranks); peer += kLanes) {
        seen_entered(ctx)[peer] = (c.halves & kSendHalf) != 0 ? ctx.load_acquire_system(entered_by(c, peer)) : 0;
    }
    ctx.warp_sync();
    return ticket;
}

// The rest, when they are over. Followed by a barrier of the block and read_head.
CROSSDOCK_DEVICE void load_head(const Ctx& ctx, const auto& c, uint32_t direct) {
    LlBlockHead* head = ll_block_head(ctx);
    if (has_duty(ctx, 1)) {
        if ((c.halves & kSendHalf) != 0 && ctx.block_idx() == ctx.num_blocks() - 1) {
            announce_entry(ctx, c, LlClock::of(head->clock), direct);
        }
        if (is_leader(ctx)) head->start_ns = ctx.now_ns();
    }
    if ((c.halves & kSendHalf) == 0 && has_duty(ctx, 2) && is_leader(ctx)) {
        head->pending_epoch = pending_of(c)->epoch;
        head->pending_buffer = pending_of(c)->buffer;
    }
}

// The clock of the next operation, and from which epoch on every buffer may be written again. One thread, that of the
// last ticket. Returns the clock that was.
CROSSDOCK_DEVICE uint64_t advance_clock(const Ctx& ctx, const auto& c, LlClock clock, const Operation& operation) {
    const LlBlockHead* head = ll_block_head(ctx);
    const uint64_t* current = head->free_from + clock.epoch % 2 * kNumBuffers;
    const uint32_t bit = 1u << operation.buffer;
    if ((c.halves & kSendHalf) == 0) {
        clock.held_buffers &= ~bit;
        c.state->free_from[clock.epoch % 2][operation.buffer] = clock.epoch;
    } else {
        ++clock.epoch;
        clock.latest_buffer = static_cast<uint32_t>(operation.buffer);
        uint64_t* next = c.state->free_from[clock.epoch % 2];
        CROSSDOCK_ROLLED
        for (int buffer = 0; buffer < kNumBuffers; ++buffer) next[buffer] = current[buffer];
        if ((c.halves & kReceiveHalf) == 0) {
            clock.held_buffers |= bit;
            *pending_of(c) = {operation.epoch, static_cast<uint32_t>(operation.buffer)};
        } else {
            next[operation.buffer] = clock.epoch;
        }
    }
    return ctx.exchange_release_device(&c.state->clock, clock.word());
}

CROSSDOCK_DEVICE bool is_last_ticket(const Ctx& ctx, uint32_t ticket) {
    return ticket + 1 == static_cast<uint32_t>(ctx.num_blocks());
}

// False: the group has failed, or every buffer is held by a pending send_only operation (which fails the group).
CROSSDOCK_DEVICE bool read_head(const Ctx& ctx, const auto& c, uint32_t ticket, Operation& operation) {
    const LlBlockHead* head = ll_block_head(ctx);
    const LlClock clock = LlClock::of(head->clock);
    operation.start_ns = head->start_ns;
    operation.losses_at_start = head->losses;
    if ((c.halves & kSendHalf) == 0) {
        operation.epoch = head->pending_epoch;
        operation.buffer = static_cast<int>(head->pending_buffer);
    } else {
        operation.epoch = clock.epoch;
        operation.buffer = choose_buffer(c, clock);
        if (operation.buffer >= 0) {
            operation.free_from =
                head->free_from[clock.epoch % 2 * kNumBuffers + static_cast<uint32_t>(operation.buffer)];
        }
    }
    const bool has_ticket = has_duty(ctx, 1) && is_leader(ctx);
    if (operation.buffer < 0) {
        WaitScope fatal = c.scope;
        fatal.masking = 0;  // no peer is to blame
        if (has_ticket && is_last_ticket(ctx, ticket)) {
            record_expired_wait(ctx, fatal, operation, WaitStep::kBuffer, c.rank, 0, clock.held_buffers);
        }
        return false;
    }
    operation.base = buffer_base(c, operation.buffer);
    if (has_ticket) {
        // The next kernel's blocks may read the clock as soon as all of this one's have come here, so not before the
        // clock's answer.
        const bool is_advanced = !is_last_ticket(ctx, ticket) || advance_clock(ctx, c, clock, operation) != 0;
        if (is_advanced) ctx.let_next_kernel_start();
    }
    return head->has_failed == 0;
}

// The peer has read what was in that buffer of it; called before the first write of an operation to a peer.
CROSSDOCK_DEVICE bool wait_credit(const Ctx& ctx, const auto& c, const Operation& operation, int peer) {
    if (!is_active(ctx, c.scope, peer)) return false;
    if (ctx.skips_credit() || peer == c.rank || seen_entered(ctx)[peer] >= operation.free_from) return true;
    const uint64_t* word = entered_by(c, peer);
    return wait_until(
        ctx, c.scope, operation, WaitStep::kCredit, peer, operation.free_from,
        [&] { return ctx.load_acquire_system(word); },
        [&](uint64_t entered) { return entered >= operation.free_from; });
}

CROSSDOCK_DEVICE bool wait_word(const Ctx& ctx, const auto& c, const Operation& operation, WaitStep step, int peer,
                                const uint64_t* word, uint64_t& payload) {
    uint64_t seen = 0;
    const bool arrived = wait_until(
        ctx, c.scope, operation, step, peer, operation.epoch,
        [&] {
            seen = ctx.load_acquire_system(word);
            return word_epoch(seen);
        },
        [&](uint64_t epoch) { return epoch == operation.epoch; });
    payload = word_payload(seen);
    return arrived;
}

// What the peer has entered with. An entry that is put may be overtaken by a later one for the same buffer, which it
// then overwrites: the signal behind the later one tells that it was here, and it counts as one of a later operation,
// whose sender has found this rank's right.
CROSSDOCK_DEVICE TaggedWord load_entry_of(const Ctx& ctx, const auto& c, const Operation& operation, int peer) {
    if constexpr (!kHasGinPeers) return load_entry(ctx, c.scope, operation, peer);
    const bool was_here = is_remote(c.reach, peer) && ctx.load_acquire_system(entered_by(c, peer)) >= operation.epoch;
    TaggedWord entry = load_entry(ctx, c.scope, operation, peer);
    if (was_here && word_epoch(entry.tag) < operation.epoch) entry.tag = pack_word(operation.epoch + 1, 0);
    return entry;
}

// One of a source's counts, and that the source has entered alike: both are looked at together. The word is all there
// is to it: nothing is ordered behind it.
CROSSDOCK_DEVICE bool wait_count(const Ctx& ctx, const auto& c, const Operation& operation, int source,
                                 const uint64_t* word, uint64_t& count) {
    if (!is_active(ctx, c.scope, source)) return false;
    uint64_t seen = 0;
    TaggedWord entry{};
    const bool came = wait_until(
        ctx, c.scope, operation, WaitStep::kCounts, source, operation.epoch,
        [&] {
            entry = load_entry_of(ctx, c, operation, source);
            seen = ctx.load_relaxed_system(word);
            return word_epoch(seen);
        },
        [&](uint64_t epoch) { return epoch == operation.epoch && has_entered_alike(entry, c.scope, operation); });
    if (came) count = word_payload(seen);
    return came;
}

CROSSDOCK_DEVICE bool wait_entry(const Ctx& ctx, const auto& c, const Operation& operation, int peer,
                                 TaggedWord& entry) {
    return wait_until(
        ctx, c.scope, operation, WaitStep::kEntry, peer, operation.epoch,
        [&] {
            entry = load_entry_of(ctx, c, operation, peer);
            return word_epoch(entry.tag);
        },
        [&](uint64_t) { return has_entered_alike(entry, c.scope, operation); });
}

// This rank itself is never masked.
CROSSDOCK_DEVICE_RARE void refuse_number(const Ctx& ctx, const auto& c, const Operation& operation, PeerNumber number,
                                         int peer, uint64_t most, uint64_t seen) {
    WaitScope scope = c.scope;
    if (peer == c.rank) scope.masking = 0;
    record_peer_fault(ctx, scope, operation, PeerFaultKind::kOutOfRange, number, peer, most, seen);
}

// A number of the peer's is at most `most`. False: nothing of it may be used.
CROSSDOCK_DEVICE bool expect_number(const Ctx& ctx, const auto& c, const Operation& operation, PeerNumber number,
                                    int peer, uint64_t most, uint64_t seen) {
    if (seen <= most) return true;
    refuse_number(ctx, c, operation, number, peer, most, seen);
    return false;
}

CROSSDOCK_DEVICE bool receives(const auto& c) { return (c.halves & (kReceiveHalf | kCancel)) == kReceiveHalf; }

CROSSDOCK_DEVICE bool is_of(const TaggedWord& word, const Operation& operation) {
    return word_epoch(word.tag) == operation.epoch;
}

CROSSDOCK_DEVICE bool wait_tagged(const Ctx& ctx, const auto& c, const Operation& operation, WaitStep step, int peer,
                                  const TaggedWord* word, uint64_t& payload) {
    TaggedWord seen{};
    const bool came = wait_until(
        ctx, c.scope, operation, step, peer, operation.epoch,
        [&] {
            seen = ctx.load_tagged(word);
            return word_epoch(seen.tag);
        },
        [&](uint64_t epoch) { return epoch == operation.epoch; });
    payload = seen.payload;
    return came;
}

// Who shares the receive half: blocks, and the last warps of each; after a loss all warps of the last block do it.
struct WorkShare {
    int block;
    int num_blocks;
    int warps;

    // Among those warps, from the last one on: the first ones are the busiest senders.
    CROSSDOCK_DEVICE int warp(const Ctx& ctx) const { return ctx.num_warps() - 1 - ctx.warp_idx(); }
    CROSSDOCK_DEVICE int thread(const Ctx& ctx) const { return warp(ctx) * kLanes + ctx.lane(); }
    CROSSDOCK_DEVICE int threads() const { return warps * kLanes; }
    CROSSDOCK_DEVICE void sync(const Ctx& ctx) const { ctx.last_warps_sync(warps); }
};

// If a peer was lost meanwhile, blocks may have seen it differently: then the block that finishes last does the whole
// receive half once more, alone, with one view of who is there. True: do it. Nothing is to be done where ranks cannot
// be lost. losses: those that the latest receive half knew of; is_last: this block is that block.
CROSSDOCK_DEVICE_RARE bool must_receive_again(const Ctx& ctx, const auto& c, uint32_t& losses, bool& is_last) {
    uint32_t* verdict = &ll_block_head(ctx)->verdict;
    const bool is_first_thread = thread_idx(ctx) == 0;
    if (!is_last) {
        ctx.block_sync();
        if (is_first_thread) {
            const uint32_t before = ctx.add_acq_rel_device(&c.state->blocks_done, 1);
            *verdict = before + 1 == static_cast<uint32_t>(ctx.num_blocks()) ? 1 : 0;
        }
        ctx.block_sync();
        is_last = *verdict != 0;
        if (!is_last) return false;
        if (is_first_thread) c.state->blocks_done = 0;
    }
    ctx.block_sync();
    if (is_first_thread) *verdict = ctx.load_relaxed_device(&c.scope.control->losses);
    ctx.block_sync();
    const bool has_changed = *verdict != losses;
    losses = *verdict;
    return has_changed;
}

// This block's.
CROSSDOCK_DEVICE WorkShare first_share(const Ctx& ctx, const auto& c, int warps) {
    const int receivers = static_cast<int>(c.receive_blocks);
    return {ctx.block_idx() - (ctx.num_blocks() - receivers), receivers, warps};
}

// Receives with this block's share, and again where that is needed: receive(share, whether it is the first time).
template <typename Receive>
CROSSDOCK_DEVICE void receive_for_good(const Ctx& ctx, const auto& c, const Operation& operation, bool runs, int warps,
                                       Receive receive) {
    if ((c.halves & kCancel) != 0) ctx.note_unread_slots_allowed();
    if (!receives(c)) return;
    uint32_t losses = operation.losses_at_start;
    WorkShare share = first_share(ctx, c, warps);
    CROSSDOCK_ROLLED
    for (bool is_last = false, is_first = true;; is_first = false) {
        if (runs && share.block >= 0 && ctx.warp_idx() >= ctx.num_warps() - share.warps) receive(share, is_first);
        if (c.scope.masking == 0 || !must_receive_again(ctx, c, losses, is_last) || !runs) return;
        share = {0, 1, ctx.num_warps()};
    }
}

// The i-th of the rows that sources announced: rows_before[r] rows come from ranks below r.
struct ArrivingRow {
    int source = 0;
    uint32_t slot = 0;

    // Moves on to row i, which must not be before the current one.
    CROSSDOCK_DEVICE void advance(const int* rows_before, int i) {
        while (rows_before[source + 1] <= i) ++source;
        slot = static_cast<uint32_t>(i - rows_before[source]);
    }
};

// Rows of scales begin where their elements allow.
CROSSDOCK_DEVICE bool is_word(const void* memory) { return reinterpret_cast<uintptr_t>(memory) % 4 == 0; }

// A multiple of 4 bytes by all lanes.
CROSSDOCK_DEVICE void copy_words(const Ctx& ctx, void* target, const void* source, uint32_t bytes) {
    if (!is_word(target) || !is_word(source)) {
        CROSSDOCK_ROLLED
        for (uint32_t i = static_cast<uint32_t>(ctx.lane()); i < bytes; i += kLanes)
            static_cast<std::byte*>(target)[i] = static_cast<const std::byte*>(source)[i];
        return;
    }
    CROSSDOCK_ROLLED
    for (uint32_t i = static_cast<uint32_t>(ctx.lane()); i < bytes / 4; i += kLanes) {
        static_cast<uint32_t*>(target)[i] = static_cast<const uint32_t*>(source)[i];
    }
}

CROSSDOCK_DEVICE void store_word(std::byte* target, uint32_t value) {
    if (is_word(target)) {
        *reinterpret_cast<uint32_t*>(target) = value;
        return;
    }
    CROSSDOCK_UNROLL
    for (uint32_t i = 0; i < 4; ++i) target[i] = static_cast<std::byte>(value >> (8 * i));
}

}  // namespace CROSSDOCK_VARIANT
}  // namespace crossdock
