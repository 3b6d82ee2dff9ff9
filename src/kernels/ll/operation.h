// SPDX-License-Identifier: Apache-2.0
// One LL operation of this rank from its beginning to its end: the clock, the buffer, this rank's entry, and the order
// of both halves' steps.
#pragma once

#include <concepts>

#include "kernels/ll/gin_peers.h"
#include "kernels/ll/masks.h"
#include "kernels/ll/waits.h"

namespace crossdock {
namespace {

inline constexpr uint32_t kNoBuffer = ~uint32_t{0};
// The first buffer that no pending operation holds, if possible not the previous operation's: so two buffers alternate,
// and their contents stay in caches. kNoBuffer: all are held.
CROSSDOCK_DEVICE uint32_t choose_buffer(const auto& c, const LlClock& clock) {
    const uint32_t free = ((1u << kNumBuffers) - 1) & ~(clock.held_buffers | c.offsets.absent_buffers);
    const uint32_t others = free & ~(1u << clock.latest_buffer);
    const uint32_t chosen = others != 0 ? others : free;
    return chosen != 0 ? number_of_ones((chosen & (0u - chosen)) - 1) : kNoBuffer;
}

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

// Every buffer is held by a pending send_only operation: a usage error, not a lost peer.
CROSSDOCK_DEVICE_RARE void refuse_buffers(const Ctx& ctx, const auto& c, Operation operation, uint32_t held) {
    WaitScope scope = c.scope;
    scope.masking = 0;
    record_expired_wait(ctx, scope, operation, WaitStep::kBuffer, c.rank, 0, held);
}

template <typename Args>
class LlOperation : public LlWaits<Args> {
  public:
    using Base = LlWaits<Args>;
    using Base::args, Base::c, Base::ctx, Base::base, Base::buffer, Base::epoch, Base::free_from, Base::start_ns;
    using Base::at, Base::block, Base::blocks, Base::cancels, Base::entered_by, Base::entered_word;
    using Base::Base;
    using Base::is_gin_peer, Base::receives, Base::sends, Base::warps;

    // Reads what blocks need while earlier kernels are ending: different warps read, so that all loads overlap. Entered
    // words only grow; a failure that is missed here is found at the next wait; the previous operation has advanced the
    // clock before any block of this one began.
    CROSSDOCK_DEVICE void look_up() {
        LlBlockHead& head = block_head(ctx);
        if (has_role(ctx, WarpRole::kClock) && is_leader(ctx)) {
            head.clock = ctx.load_relaxed_system(&c.state->clock);
            // The ticket is taken after the clock is read: a bit that is never set makes it depend on the clock. The
            // ticket is not needed here.
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
            const bool announces = sends() && block() == blocks() - 1;
            if constexpr (kHasGinPeers) {
                if (sends() && is_leader(ctx)) await_outbox(ctx, c, LlClock::of(head.clock).epoch, announces);
                ctx.warp_sync();
            }
            if (announces) announce_entry(LlClock::of(head.clock), direct);
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
template <typename Args>
LlOperation(const Ctx&, const Args&) -> LlOperation<Args>;

// The steps of an operation's halves, in the order in which run_operation calls those of one half.
template <typename Half>
concept SendHalf = requires(Half half, bool (*begin)()) {
    { Half::kSteps } -> std::convertible_to<KernelSteps>;
    half.init();     // what needs no data of earlier kernels
    half.fetch();    // loads what they have written
    half.prepare();  // before a block barrier: completes what was loaded
    // Once all loads that do not need the operation's epoch and buffer are issued, calls begin(), which returns whether
    // the operation runs, and then sends. Returns the same.
    { half.run(begin) } -> std::same_as<bool>;
};
template <typename Half>
concept ReceiveHalf = requires(Half half, const WorkShare& share, bool is_first) {
    half.fetch();       // before the send half's
    half.look_ahead();  // at the end of begin(), if the operation runs: prefetches
    half.run(share, is_first);
};

// Runs an operation, as much of it as possible before its epoch and buffer are known.
CROSSDOCK_DEVICE void run_operation(auto& op, uint32_t direct, SendHalf auto& send, ReceiveHalf auto& receive) {
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
