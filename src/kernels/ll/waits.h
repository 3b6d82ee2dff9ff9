// SPDX-License-Identifier: Apache-2.0
// What an LL operation waits for: credits of peers before its first write to them, their entries, and words that carry
// the operation's epoch.
#pragma once

#include "kernels/ll/peers.h"

namespace crossdock {

// An operation that takes longer looks at the entries of all ranks while it waits for one. Many loads, one after the
// other, so that a short wait on a GPU had better do without.
inline constexpr uint64_t kPatienceNs = kLanes == 1 ? 0 : 10'000'000;

namespace {

template <typename Args>
class LlWaits : public LlPeers<Args> {
  public:
    using Base = LlPeers<Args>;
    using Base::args, Base::c, Base::ctx, Base::epoch, Base::free_from, Base::entered_by, Base::is_gin_peer;
    using Base::Base;

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

    // The peer's entry. Entries that a GIN peer puts may arrive in another order. If the peer's signal has this epoch
    // but the entry is older, an entry of this epoch or a later one was here and was overwritten. It then counts as one
    // of a later operation, whose sender has accepted this rank's terms.
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

  private:
    // Waits that do not succeed at once, kept out of the code that runs every time.
    CROSSDOCK_DEVICE_RARE static bool wait_for_credit(const Ctx& ctx, const Args& args, Operation operation,
                                                      uint32_t peer) {
        const LlWaits op(ctx, args, operation);
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
        const LlWaits op(ctx, args, operation);
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
};

}  // namespace
}  // namespace crossdock
