// SPDX-License-Identifier: Apache-2.0
// High throughput: rings, through which packets of rows or weights go. Packet p goes into slot p modulo the number of
// slots. Both kinds of rings, inside an LSA team and between teams, have the same verbs. docs/protocol.md, Rings.
//
// Rings keep ranks as int: unsigned ones would cost combine registers.
#pragma once

#include "kernels/ht/teams.h"

namespace crossdock {
namespace {

// ---- rings inside a team ----

// A ring from a sender to a receiver, one of which is this rank. Packets and flags lie in the receiver's memory,
// credits in the sender's. Both number their rings by whom they are for: dispatch's rings and combine's credits by the
// rows' source, dispatch's credits and combine's rings by routes. In one team these are the peers' ranks.
class LsaRing {
  public:
    // Dispatch: for rows of `source`, whose agent the sender is.
    static CROSSDOCK_DEVICE LsaRing dispatch_to(const HtCommon& c, uint32_t source, uint32_t peer, uint32_t channel) {
        return LsaRing(c, c.offsets.rows, c.rank, peer, source, route_of(c, source, peer), channel);
    }
    static CROSSDOCK_DEVICE LsaRing dispatch_from(const HtCommon& c, uint32_t source, uint32_t channel) {
        return LsaRing(c, c.offsets.rows, agent_of(c, source), c.rank, source, route_of(c, source, c.rank), channel);
    }
    // Combine: for rows that return to `source`, whose agent the receiver is.
    static CROSSDOCK_DEVICE LsaRing combine_to(const HtCommon& c, uint32_t source, uint32_t channel) {
        return LsaRing(c, c.offsets.rows, c.rank, agent_of(c, source), route_of(c, source, c.rank), source, channel);
    }
    static CROSSDOCK_DEVICE LsaRing combine_from(const HtCommon& c, uint32_t source, uint32_t peer, uint32_t channel) {
        return LsaRing(c, c.offsets.rows, peer, c.rank, route_of(c, source, peer), source, channel);
    }
    static CROSSDOCK_DEVICE LsaRing weights_to(const HtCommon& c, uint32_t peer, uint32_t channel) {
        return LsaRing(c, c.offsets.weights, c.rank, peer, c.rank, peer, channel);
    }
    static CROSSDOCK_DEVICE LsaRing weights_from(const HtCommon& c, uint32_t peer, uint32_t channel) {
        return LsaRing(c, c.offsets.weights, peer, c.rank, peer, c.rank, channel);
    }

    // The memory of a packet.
    CROSSDOCK_DEVICE std::byte* packet(const HtSlots& slots, uint32_t number) const {
        return c_.peers.at(receiver_, rings_.packets.offset + ring_ * rings_.ring_bytes) +
               uint64_t{number % slots.num} * slots.stride;
    }

    // The sender, one lane. Returns whether the packet's slot is free.
    CROSSDOCK_DEVICE bool has_credit(const Ctx& ctx, const Operation& operation, const HtSlots& slots,
                                     uint32_t number) const {
        return number < slots.num ||
               ctx.load_relaxed_system(credit_word(slots, number)) == pack_word(operation.epoch, number - slots.num);
    }
    // Waits until the slot is free: then the packet may be written. Returns false if the receiver is lost.
    CROSSDOCK_DEVICE bool wait_credit(const Ctx& ctx, const Operation& operation, const HtSlots& slots,
                                      uint32_t number) const {
        const bool is_free = number < slots.num || ctx.skips_credit()
                                 ? is_active(ctx, c_.scope, receiver_)
                                 : wait_ring_word(ctx, c_, operation, WaitStep::kCredit, receiver_,
                                                  credit_word(slots, number), number - slots.num);
        if (is_free)
            ctx.note_slot_written(c_.rank, receiver_, c_.peers.at(receiver_, 0), rings_.kind,
                                  ring_ * kMaxRingSlots + number % slots.num, pack_word(operation.epoch, number));
        return is_free;
    }
    // Behind a fence of the lane that covers the packet; or with one.
    CROSSDOCK_DEVICE void raise_flag(const Ctx& ctx, const Operation& operation, const HtSlots& slots,
                                     uint32_t number) const {
        ctx.store_entered_system(flag_word(slots, number), pack_word(operation.epoch, number));
    }
    CROSSDOCK_DEVICE void release_flag(const Ctx& ctx, const Operation& operation, const HtSlots& slots,
                                       uint32_t number) const {
        ctx.store_release_system(flag_word(slots, number), pack_word(operation.epoch, number));
    }

    // The receiver, one lane. Returns whether wait_packet would return at once; before the packet is read, call that.
    CROSSDOCK_DEVICE bool has_packet(const Ctx& ctx, const Operation& operation, const HtSlots& slots,
                                     uint32_t number) const {
        return ctx.load_relaxed_system(flag_word(slots, number)) == pack_word(operation.epoch, number);
    }
    // Returns false if the sender is masked, the group has failed or the wait timed out.
    CROSSDOCK_DEVICE bool wait_packet(const Ctx& ctx, const Operation& operation, const HtSlots& slots,
                                      uint32_t number) const {
        if (!is_active(ctx, c_.scope, sender_)) return false;
        return wait_ring_word(ctx, c_, operation, WaitStep::kRow, sender_, flag_word(slots, number), number);
    }
    // Once the packet's bytes have been read: the loads have their values, so nothing is to be ordered. Behind a
    // barrier of the lanes that read.
    CROSSDOCK_DEVICE void give_credit(const Ctx& ctx, const Operation& operation, const HtSlots& slots,
                                      uint32_t number) const {
        ctx.note_slot_read(c_.rank, c_.peers.at(c_.rank, 0), rings_.kind, ring_ * kMaxRingSlots + number % slots.num,
                           pack_word(operation.epoch, number));
        ctx.store_entered_system(credit_word(slots, number), pack_word(operation.epoch, number));
    }

  private:
    CROSSDOCK_DEVICE LsaRing(const HtCommon& c, const HtRings& rings, int sender, int receiver, int ring, int credits,
                             uint32_t channel)
        : c_(c),
          rings_(rings),
          sender_(sender),
          receiver_(receiver),
          ring_(static_cast<uint64_t>(ring) * c.arena.channels + channel),
          credits_(static_cast<uint64_t>(credits) * c.arena.channels + channel) {}

    CROSSDOCK_DEVICE uint64_t* flag_word(const HtSlots& slots, uint32_t number) const {
        return c_.peers.at(receiver_, rings_.flags) + (ring_ * kMaxRingSlots + number % slots.num);
    }
    CROSSDOCK_DEVICE uint64_t* credit_word(const HtSlots& slots, uint32_t number) const {
        return c_.peers.at(sender_, rings_.credits) + (credits_ * kMaxRingSlots + number % slots.num);
    }

    const HtCommon& c_;
    const HtRings& rings_;
    int sender_;
    int receiver_;
    uint64_t ring_;     // among the receiver's
    uint64_t credits_;  // among the sender's
};

// ---- rings between teams ----

// This rank's end of a ring to and from a rank of another team. Offsets are those of one channel's first slot.
//
// One put may send several packets. It sets the flag of the first one's slot to the number of the packet after the last
// one. So whoever waits for a packet looks at the flag of the first packet that has not arrived.
//
// A credit covers a batch of packets: half the slots, whose number is even. The warp that takes the last packet of a
// batch, by a counter in the block's shared memory, gives the credit. Two counters and two credit words per ring are
// enough: no packet of a batch is sent before the second batch before it is done.
class GinRing {
  public:
    // ring_here: the ring's index among this rank's of that kind; ring_there: among the peer's; first_state: of the
    // rings of that kind.
    CROSSDOCK_DEVICE GinRing(const HtCommon& c, const HtGinRings& rings, int peer, int ring_here, int ring_there,
                             uint32_t channel, int first_state)
        : c_(c),
          peer_(peer),
          state_(first_state + ring_here),
          own_words_(words_of(ring_here, channel)),
          peer_words_(words_of(ring_there, channel)),
          outbox_(rings.outbox.offset + bytes_of(rings, ring_here, channel)),
          packets_here_(rings.packets.offset + bytes_of(rings, ring_here, channel)),
          packets_there_(rings.packets.offset + bytes_of(rings, ring_there, channel)),
          rings_(rings) {}

    static CROSSDOCK_DEVICE GinRing of_rows(const HtCommon& c, uint32_t team, uint32_t channel) {
        return GinRing(c, c.outbox.rows, rail_peer(c, team), team, own_team(c), channel, 0);
    }
    static CROSSDOCK_DEVICE GinRing of_weights(const HtCommon& c, uint32_t peer, uint32_t channel) {
        return GinRing(c, c.outbox.weights, peer, peer, c.rank, channel, num_teams(c));
    }
    // Followed by a block barrier.
    static CROSSDOCK_DEVICE void init_states(const Ctx& ctx, const HtCommon& c) {
        if constexpr (!kHasGinPeers) return;
        const uint32_t num = num_gin_rings(c.arena.num_ranks, num_teams(c));
        CROSSDOCK_ROLLED
        for (uint32_t i = thread_idx(ctx); i < num; i += num_threads(ctx)) states(ctx)[i] = {};
    }

    // The memory of packet `number` to put, and of a packet that has arrived.
    CROSSDOCK_DEVICE std::byte* outgoing(const HtSlots& slots, uint32_t number) const {
        return at(outbox_ + slot_bytes(slots, number));
    }
    CROSSDOCK_DEVICE const std::byte* incoming(const HtSlots& slots, uint32_t number) const {
        return at(packets_here_ + slot_bytes(slots, number));
    }

    // One lane. Returns whether the packet's slot is free at both ends.
    CROSSDOCK_DEVICE bool has_credit(const Ctx& ctx, const Operation& operation, const HtSlots& slots,
                                     uint32_t number) const {
        const uint32_t batch = number / batch_size(slots);
        return batch < 2 || ctx.skips_credit() ||
               ctx.load_acquire_system(word_at(credit_word(batch))) == pack_word(operation.epoch, batch - 2);
    }
    // Waits until the slot is free. Returns false if the group has failed.
    CROSSDOCK_DEVICE_RARE bool wait_credit(const Ctx& ctx, const Operation& operation, const HtSlots& slots,
                                           uint32_t number) const {
        if (has_credit(ctx, operation, slots, number)) return true;
        const uint32_t batch = number / batch_size(slots);
        return wait_ring_word(ctx, c_, operation, WaitStep::kCredit, peer_, word_at(credit_word(batch)), batch - 2);
    }

    // A packet that is put by itself. One lane, after a warp barrier: sends the packet's first bytes, which this lane's
    // warp has written. Other warps may send others of this ring meanwhile.
    CROSSDOCK_DEVICE void send(const Ctx& ctx, const Operation& operation, const HtSlots& slots, uint32_t number,
                               uint32_t bytes) const {
        put(ctx, operation, slots, number, number + 1, bytes);
    }
    // A packet that may be put with others; one warp sends all of the ring. The same lane and barrier.
    // packet_bytes: of each.
    CROSSDOCK_DEVICE void send_later(const Ctx& ctx, const Operation& operation, const HtSlots& slots, uint32_t number,
                                     uint32_t packet_bytes) const {
        GinRingState& state = states(ctx)[state_];
        state.filled = number + 1;
        if (state.filled % batch_size(slots) == 0) send_filled(ctx, operation, slots, packet_bytes);
    }
    CROSSDOCK_DEVICE void send_filled(const Ctx& ctx, const Operation& operation, const HtSlots& slots,
                                      uint32_t packet_bytes) const {
        GinRingState& state = states(ctx)[state_];
        if (state.put == state.filled) return;
        put(ctx, operation, slots, state.put, state.filled, packet_bytes);
        state.put = state.filled;
    }

    // One lane. Waits until the packet and all before it have arrived. Returns false if the group has failed. Not
    // inlined, like give_credit and put: kernels would be larger and spill more registers.
    CROSSDOCK_DEVICE_RARE bool wait_packet(const Ctx& ctx, const Operation& operation, const HtSlots& slots,
                                           uint32_t number) const {
        return wait_for(
            ctx, c_, operation, WaitStep::kRow, peer_, uint64_t{number} + 1,
            [&] { return uint64_t{num_arrived(ctx, operation, slots, number)}; },
            [&](uint64_t arrived) { return arrived > number; });
    }
    // One lane, after a barrier of the lanes that have read the packet.
    CROSSDOCK_DEVICE_RARE void give_credit(const Ctx& ctx, const Operation& operation, const HtSlots& slots,
                                           uint32_t number) const {
        const uint32_t size = batch_size(slots);
        const uint32_t batch = number / size;
        uint32_t* const taken = &states(ctx)[state_].taken[batch % 2];
        if (ctx.add_acq_rel_shared(taken, 1) + 1 < size) return;
        ctx.add_shared(taken, 0 - size);
        raise_word(ctx, c_.reach, peer_,
                   raise_of(rings_.credits, rings_.raised_credits, batch % 2, pack_word(operation.epoch, batch)));
    }

  private:
    static CROSSDOCK_DEVICE GinRingState* states(const Ctx& ctx) {
        return reinterpret_cast<GinRingState*>(ctx.shared_memory() + kGinStatesOffset);
    }
    // Packets first to end, of one batch.
    CROSSDOCK_DEVICE_RARE void put(const Ctx& ctx, const Operation& operation, const HtSlots& slots, uint32_t first,
                                   uint32_t end, uint32_t bytes_of_last) const {
        ctx.fence_system();
        const Raise flag =
            raise_of(rings_.flags, rings_.raised_flags, slot_of(slots, first), pack_word(operation.epoch, end));
        const uint64_t bytes = uint64_t{end - 1 - first} * slots.stride + bytes_of_last;
        if (bytes == 0) return raise_word(ctx, c_.reach, peer_, flag);
        put_and_raise(ctx, c_.reach, peer_, packets_there_ + slot_bytes(slots, first),
                      outbox_ + slot_bytes(slots, first), bytes, flag);
    }
    // A flag of a later turn of its slot says nothing, since packets between may be under way. In that case another
    // warp has seen those of this turn arrive, and the next look at `arrived` finds them.
    CROSSDOCK_DEVICE uint32_t num_arrived(const Ctx& ctx, const Operation& operation, const HtSlots& slots,
                                          uint32_t wanted) const {
        GinRingState& state = states(ctx)[state_];
        const uint32_t known = ctx.load_acquire_shared(&state.arrived);
        if (known > wanted) return known;
        const uint64_t word = ctx.load_acquire_system(word_at(flag_word(slots, known)));
        const uint32_t told = static_cast<uint32_t>(word_payload(word));
        if (word_epoch(word) != operation.epoch || told <= known || told - known > batch_size(slots)) return known;
        ctx.max_release_shared(&state.arrived, told);
        return told;
    }
    static CROSSDOCK_DEVICE uint32_t batch_size(const HtSlots& slots) { return slots.num / 2; }
    static CROSSDOCK_DEVICE uint32_t slot_of(const HtSlots& slots, uint32_t number) { return number % slots.num; }
    CROSSDOCK_DEVICE uint64_t words_of(int ring, uint32_t channel) const {
        return 8 * (static_cast<uint64_t>(ring) * c_.arena.channels + channel) * kMaxRingSlots;
    }
    CROSSDOCK_DEVICE uint64_t bytes_of(const HtGinRings& rings, int ring, uint32_t channel) const {
        return (static_cast<uint64_t>(ring) * c_.arena.channels + channel) * rings.ring_bytes;
    }
    static CROSSDOCK_DEVICE uint64_t slot_bytes(const HtSlots& slots, uint32_t number) {
        return uint64_t{slot_of(slots, number)} * slots.stride;
    }
    CROSSDOCK_DEVICE std::byte* at(uint64_t offset) const { return c_.reach.network.local + offset; }
    CROSSDOCK_DEVICE uint64_t flag_word(const HtSlots& slots, uint32_t number) const {
        return rings_.flags.offset + own_words_ + 8 * slot_of(slots, number);
    }
    CROSSDOCK_DEVICE uint64_t credit_word(uint32_t batch) const {
        return rings_.credits.offset + own_words_ + 8 * (batch % 2);
    }
    CROSSDOCK_DEVICE const uint64_t* word_at(uint64_t offset) const {
        return reinterpret_cast<const uint64_t*>(at(offset));
    }
    CROSSDOCK_DEVICE Raise raise_of(const Region<uint64_t>& words, const Region<uint64_t>& raised, uint32_t word,
                                    uint64_t value) const {
        return {words.offset + peer_words_ + 8 * word, raised.offset + own_words_ + 8 * word, value};
    }

    const HtCommon& c_;
    int peer_;
    int state_;
    uint64_t own_words_;
    uint64_t peer_words_;
    uint64_t outbox_;
    uint64_t packets_here_;
    uint64_t packets_there_;
    const HtGinRings& rings_;
};

// The rows that one warp sends to other teams. Each of the `warps` that do so has some of the teams: it sends all rows
// of their rings. Before it waits for anyone it must send what it has filled, since the peer may need that: wait_credit
// does so, and before other waits the caller calls send_filled.
class GinSender {
  public:
    CROSSDOCK_DEVICE GinSender(const HtCommon& c, const Operation& operation, const HtSlots& slots,
                               uint32_t packet_bytes, uint32_t channel, uint32_t warp, uint32_t warps)
        : c_(c),
          operation_(operation),
          slots_(slots),
          packet_bytes_(packet_bytes),
          channel_(channel),
          warp_(warp),
          warps_(warps) {}

    // Calls visit(team) for this warp's teams, the next one first, until it returns false. Returns what it returned
    // last.
    template <typename Visit>
    CROSSDOCK_DEVICE bool for_teams(Visit visit) const {
        CROSSDOCK_ROLLED
        for (uint32_t i = 1 + warp_; i < num_teams(c_); i += warps_) {
            if (!visit((own_team(c_) + i) % num_teams(c_))) return false;
        }
        return true;
    }

    // One lane; as GinRing's.
    CROSSDOCK_DEVICE bool wait_credit(const Ctx& ctx, const GinRing& ring, uint32_t number) const {
        if (ring.has_credit(ctx, operation_, slots_, number)) return true;
        send_filled(ctx);
        return ring.wait_credit(ctx, operation_, slots_, number);
    }
    CROSSDOCK_DEVICE void send_later(const Ctx& ctx, const GinRing& ring, uint32_t number) const {
        ring.send_later(ctx, operation_, slots_, number, packet_bytes_);
    }
    CROSSDOCK_DEVICE_RARE void send_filled(const Ctx& ctx) const {
        for_teams([&](uint32_t team) {
            GinRing::of_rows(c_, team, channel_).send_filled(ctx, operation_, slots_, packet_bytes_);
            return true;
        });
    }

  private:
    const HtCommon& c_;
    const Operation& operation_;
    const HtSlots& slots_;
    uint32_t packet_bytes_;
    uint32_t channel_;
    uint32_t warp_;
    uint32_t warps_;
};

}  // namespace
}  // namespace crossdock
