// SPDX-License-Identifier: Apache-2.0
// High throughput: the flags of packets.
//
// Before a flag stands a fence, which on GPUs waits for the stores of the whole SM: 5 to 10 us while all its warps
// store rows. So senders do not fence. They tell the block's announcer which packets have landed, and it raises the
// flags of all of them behind one fence. Where there is no announcer (HtWarpLayout), senders raise flags themselves.
#pragma once

#include "device/block_barrier.h"
#include "kernels/ht/operation.h"

namespace crossdock {
namespace {

// A packet whose row has landed: whose it is, and its number.
struct LandedPacket {
    uint32_t target;  // the receiver (dispatch) or the source rank (combine); kNoRank: none
    uint32_t number;

    // Inside a team, dispatch's ring to a receiver is combine's to the same rank.
    CROSSDOCK_DEVICE void raise_flag(const Ctx& ctx, const HtCommon& c, const Operation& operation,
                                     const HtSlots& slots) const {
        LsaRing::combine_to(c, target, ctx.block_idx()).raise_flag(ctx, operation, slots, number);
    }
};

// What a sender tells the announcer, in shared memory. Each sender uses its notes in turn. Lanes arrive at the
// barriers, and wait for them, each for what it writes and reads itself.
struct HtNote {
    BlockBarrierMemory written;
    BlockBarrierMemory read;
    uint32_t round;      // how often the announcer has read it
    uint32_t num_notes;  // the sender's last note: how many it has written; else 0
    LandedPacket packets[kLanes];

    CROSSDOCK_DEVICE static HtNote& of(const Ctx& ctx, const HtShared& shared, uint32_t i) {
        return reinterpret_cast<HtNote*>(shared.notes.in(ctx.shared_memory()))[i];
    }
    // Followed by a barrier of the block.
    CROSSDOCK_DEVICE static void init_all(const Ctx& ctx, const HtWarpLayout& warp_layout, const HtShared& shared) {
        CROSSDOCK_ROLLED
        for (uint32_t i = thread_idx(ctx); i < warp_layout.notes(); i += num_threads(ctx)) {
            HtNote& note = of(ctx, shared, i);
            BlockBarrier(note.written).init(kLanes);
            BlockBarrier(note.read).init(kLanes);
            note.round = 0;
            note.num_notes = 0;
            CROSSDOCK_ROLLED
            for (LandedPacket& packet : note.packets) packet = {kNoRank, 0};
        }
        RowStage::initialised();
    }
};
static_assert(sizeof(HtNote) == note_bytes(kLanes));

// The flag of a lane's latest packet. It is raised while the next row is on its way, when the packet's row has landed.
class PendingFlag {
  public:
    // sender: the warp's number among those that send rows.
    CROSSDOCK_DEVICE PendingFlag(const HtWarpLayout& warp_layout, const HtShared& shared, uint32_t sender)
        : shared_(shared), has_announcer_(warp_layout.announcers > 0), first_note_(sender * kNotesOfSender) {}

    // Behind the packet's stores. target: as of LandedPacket.
    CROSSDOCK_DEVICE void set(uint32_t target, uint32_t number) { packet_ = {target, number}; }
    CROSSDOCK_DEVICE bool is_set() const { return packet_.target != kNoRank; }

    // One warp: of all lanes.
    CROSSDOCK_DEVICE void raise_all(const Ctx& ctx, const HtCommon& c, const Operation& operation,
                                    const HtSlots& slots) {
        if (!ctx.warp_any(is_set())) return;
        if (is_set()) wait_landed(ctx, 0);
        if (!has_announcer_) {
            if (is_set()) raise_here(ctx, c, operation, slots);
            return ctx.warp_sync();
        }
        HtNote& note = next_note(ctx);
        note.packets[ctx.lane()] = packet_;
        packet_.target = kNoRank;
        BlockBarrier(note.written).arrive(ctx);
    }
    // The leader, if only it has packets. later_groups: of stores that it has issued since.
    CROSSDOCK_DEVICE void raise_own(const Ctx& ctx, const HtCommon& c, const Operation& operation, const HtSlots& slots,
                                    int later_groups) {
        if (!is_set()) return;
        wait_landed(ctx, later_groups);
        if (!has_announcer_) return raise_here(ctx, c, operation, slots);
        HtNote& note = next_note(ctx);
        note.packets[0] = packet_;
        packet_.target = kNoRank;
        BlockBarrier(note.written).arrive(ctx, kLanes);
    }
    // One warp, at the end: nothing more will come.
    CROSSDOCK_DEVICE void end(const Ctx& ctx) {
        if (!has_announcer_ || !is_leader(ctx)) return;
        HtNote& note = next_note(ctx);
        note.num_notes = num_;
        BlockBarrier(note.written).arrive(ctx, kLanes);
    }

  private:
    CROSSDOCK_DEVICE void wait_landed(const Ctx& ctx, int later_groups) const {
        RowStage::wait_stores(ctx, later_groups);
        ctx.fence_async_copies();
    }
    CROSSDOCK_DEVICE void raise_here(const Ctx& ctx, const HtCommon& c, const Operation& operation,
                                     const HtSlots& slots) {
        ctx.fence_landed();
        packet_.raise_flag(ctx, c, operation, slots);
        packet_.target = kNoRank;
    }
    // Waits until the announcer has read what was in it.
    CROSSDOCK_DEVICE HtNote& next_note(const Ctx& ctx) {
        HtNote& note = HtNote::of(ctx, shared_, first_note_ + num_ % kNotesOfSender);
        BlockBarrier(note.read).wait_for_turn(ctx, num_ / kNotesOfSender);
        ++num_;
        return note;
    }

    const HtShared& shared_;
    bool has_announcer_;
    uint32_t first_note_;
    uint32_t num_ = 0;  // of notes written
    LandedPacket packet_{kNoRank, 0};
};

// The announcer, one warp: reads all notes of all senders. It counts them, since it may see that a sender's last note
// is written, and not yet see so of the one before.
CROSSDOCK_DEVICE void announce_packets(const Ctx& ctx, const HtCommon& c, const HtWarpLayout& warp_layout,
                                       const HtShared& shared, const Operation& operation, const HtSlots& slots) {
    uint32_t senders = warp_layout.noting_senders();  // whose last note is unread
    uint32_t balance = 0;  // how many notes there are, as last notes tell, less those that were read (modulo 2^32)
    CROSSDOCK_ROLLED
    while (senders > 0 || balance != 0) {
        bool found = false;
        CROSSDOCK_ROLLED
        for (uint32_t base = 0; base < warp_layout.notes(); base += kLanes) {
            const uint32_t own = base + ctx.lane();
            HtNote* const note = own < warp_layout.notes() ? &HtNote::of(ctx, shared, own) : nullptr;
            const bool is_written = note != nullptr && BlockBarrier(note->written).is_over(ctx, note->round);
            const uint32_t written = ctx.warp_ballot(is_written);
            if (written == 0) continue;
            found = true;
            CROSSDOCK_ROLLED
            for (uint32_t left = written; left != 0; left &= left - 1) {
                HtNote& read = HtNote::of(ctx, shared, base + lowest_one(left));
                BlockBarrier(read.written).wait(ctx, read.round);  // it is over; for this lane, too
            }
            ctx.fence_landed();
            CROSSDOCK_ROLLED
            for (uint32_t left = written; left != 0; left &= left - 1) {
                HtNote& read = HtNote::of(ctx, shared, base + lowest_one(left));
                LandedPacket& packet = read.packets[ctx.lane()];
                if (packet.target != kNoRank) packet.raise_flag(ctx, c, operation, slots);
                packet.target = kNoRank;
                senders -= read.num_notes > 0 ? 1 : 0;
                balance += read.num_notes - 1;
                BlockBarrier(read.read).arrive(ctx);
            }
            ctx.warp_sync();
            if (is_written) ++note->round;
            ctx.warp_sync();
        }
        if (!found) ctx.pause(UINT64_MAX);
    }
}

}  // namespace
}  // namespace crossdock
