// SPDX-License-Identifier: Apache-2.0
// High throughput in several LSA teams: agents, and the rings between teams.
//
// A row is sent once to each other team that has one of the token's experts: to the rail peer, the rank with the same
// place in its team, which forwards the row to the ranks of the experts. In a combine the same rank sums the rows of
// its team, and one row returns to the source rank. So inside a team the rail peer is the *agent* of a source rank of
// another team; a source rank in this team is its own agent. A *lane* numbers the pairs (source, LSA peer) of an agent,
// its own pairs like the ranks.
#pragma once

#include "kernels/ht/waits.h"

namespace crossdock {
namespace {

// ---- agents ----

// The ranks of this team: [first, end).
CROSSDOCK_DEVICE int first_of_team(const HtCommon& c) {
    if constexpr (!kHasGinPeers) return 0;
    return c.reach.first_of_team;
}
CROSSDOCK_DEVICE int end_of_team(const HtCommon& c) {
    if constexpr (!kHasGinPeers) return static_cast<int>(c.arena.num_ranks);
    return c.reach.end_of_team;
}
CROSSDOCK_DEVICE int team_size(const HtCommon& c) { return end_of_team(c) - first_of_team(c); }
CROSSDOCK_DEVICE int num_teams(const HtCommon& c) {
    if constexpr (!kHasGinPeers) return 1;
    return static_cast<int>(c.arena.num_ranks) / team_size(c);
}
CROSSDOCK_DEVICE int own_team(const HtCommon& c) { return first_of_team(c) / team_size(c); }

CROSSDOCK_DEVICE int agent_of(const HtCommon& c, int source) {
    if constexpr (!kHasGinPeers) return source;
    return first_of_team(c) + source % team_size(c);
}
CROSSDOCK_DEVICE int lane_of(const HtCommon& c, int source, int lsa_peer) {
    if constexpr (!kHasGinPeers) return lsa_peer;
    return source / team_size(c) * team_size(c) + lsa_peer - first_of_team(c);
}
// The source rank in a team for which this rank is the agent.
CROSSDOCK_DEVICE int rail_peer(const HtCommon& c, int team) { return team * team_size(c) + c.rank - first_of_team(c); }

// Data that this rank puts, or that was put to it, at an offset of its own arena.
template <typename T>
CROSSDOCK_DEVICE T* in_own_arena(const HtCommon& c, uint64_t offset) {
    return reinterpret_cast<T*>(c.reach.network.local + offset);
}

// ---- what crosses ----

enum class Crossing : uint32_t {
    kOut,  // own tokens, to another team
    kIn    // tokens of another team's rail peer, to this team
};

CROSSDOCK_DEVICE uint32_t* crossing_masks(const HtCommon& c, Crossing direction, int team) {
    return c.tables.crossing_masks +
           static_cast<uint32_t>(static_cast<int>(direction) * num_teams(c) + team) * c.tables.chunks;
}
CROSSDOCK_DEVICE uint32_t* crossing_firsts(const HtCommon& c, Crossing direction, int team) {
    return c.tables.crossing_firsts +
           static_cast<uint32_t>(static_cast<int>(direction) * num_teams(c) + team) * (c.tables.chunks + 1);
}

// ---- rings between teams ----

// This rank's end of a ring to and from a rank of another team. Offsets are those of one channel's first slot.
// A credit covers a batch of packets: half the slots, whose number is even. The warp that takes the last packet of a
// batch, by a counter in the block's shared memory, gives the credit. Two counters and two credit words per ring are
// enough: no packet of a batch is sent before the second batch before it is done.
class GinRing {
  public:
    // ring_here: the ring's index among this rank's of that kind; ring_there: among the peer's; first_counter: of the
    // rings of that kind.
    CROSSDOCK_DEVICE GinRing(const HtCommon& c, const HtGinRings& rings, int peer, int ring_here, int ring_there,
                             uint32_t channel, int first_counter)
        : c_(c),
          peer_(peer),
          counters_(first_counter + 2 * ring_here),
          own_words_(words_of(ring_here, channel)),
          peer_words_(words_of(ring_there, channel)),
          outbox_(rings.outbox + bytes_of(rings, ring_here, channel)),
          packets_here_(rings.packets + bytes_of(rings, ring_here, channel)),
          packets_there_(rings.packets + bytes_of(rings, ring_there, channel)),
          rings_(rings) {}

    static CROSSDOCK_DEVICE GinRing of_rows(const HtCommon& c, int team, uint32_t channel) {
        return GinRing(c, c.outbox.rows, rail_peer(c, team), team, own_team(c), channel, 0);
    }
    static CROSSDOCK_DEVICE GinRing of_weights(const HtCommon& c, int peer, uint32_t channel) {
        return GinRing(c, c.outbox.weights, peer, peer, c.rank, channel, 2 * num_teams(c));
    }
    // Followed by a block barrier.
    static CROSSDOCK_DEVICE void init_counters(const Ctx& ctx, const HtCommon& c) {
        if constexpr (!kHasGinPeers) return;
        const uint32_t num = num_gin_counters(c.arena.num_ranks, static_cast<uint32_t>(num_teams(c)));
        CROSSDOCK_ROLLED
        for (uint32_t i = static_cast<uint32_t>(thread_idx(ctx)); i < num; i += static_cast<uint32_t>(num_threads(ctx)))
            counters(ctx)[i] = 0;
    }

    // The memory of packet `number` to put, and of a packet that has arrived.
    CROSSDOCK_DEVICE std::byte* outgoing(const HtSlots& slots, uint32_t number) const {
        return at(outbox_ + slot_bytes(slots, number));
    }
    CROSSDOCK_DEVICE const std::byte* incoming(const HtSlots& slots, uint32_t number) const {
        return at(packets_here_ + slot_bytes(slots, number));
    }

    // One lane. Waits until the packet's slot is free at both ends. Returns false if the group has failed.
    CROSSDOCK_DEVICE bool wait_credit(const Ctx& ctx, const Operation& operation, const HtSlots& slots,
                                      uint32_t number) const {
        const uint32_t batch = number / batch_size(slots);
        if (batch < 2 || ctx.skips_credit()) return true;
        return wait_word(ctx, operation, WaitStep::kCredit, rings_.credits + own_words_ + 8 * (batch % 2), batch - 2);
    }
    // One lane, after a warp barrier. Sends the packet's first bytes, which this lane's warp has written, with their
    // flag. Not inlined, like give_credit: kernels would spill more registers.
    CROSSDOCK_DEVICE_RARE void send(const Ctx& ctx, const Operation& operation, const HtSlots& slots, uint32_t number,
                                    uint32_t bytes) const {
        ctx.fence_system();
        const Raise flag =
            raise_of(rings_.flags, rings_.raised_flags, slot_of(slots, number), pack_word(operation.epoch, number));
        if (bytes == 0) return raise_word(ctx, c_.reach, peer_, flag);
        put_and_raise(ctx, c_.reach, peer_, packets_there_ + slot_bytes(slots, number),
                      outbox_ + slot_bytes(slots, number), bytes, flag);
    }
    CROSSDOCK_DEVICE bool wait_packet(const Ctx& ctx, const Operation& operation, const HtSlots& slots,
                                      uint32_t number) const {
        return wait_word(ctx, operation, WaitStep::kRow, rings_.flags + own_words_ + 8 * slot_of(slots, number),
                         number);
    }
    // One lane, after a barrier of the lanes that have read the packet.
    CROSSDOCK_DEVICE_RARE void give_credit(const Ctx& ctx, const Operation& operation, const HtSlots& slots,
                                           uint32_t number) const {
        const int size = static_cast<int>(batch_size(slots));
        const uint32_t batch = number / batch_size(slots);
        int* const taken = counters(ctx) + counters_ + batch % 2;
        if (ctx.add_acq_rel_shared(taken, 1) + 1 < size) return;
        ctx.add_shared(taken, -size);
        raise_word(ctx, c_.reach, peer_,
                   raise_of(rings_.credits, rings_.raised_credits, batch % 2, pack_word(operation.epoch, batch)));
    }

  private:
    static CROSSDOCK_DEVICE int* counters(const Ctx& ctx) {
        return reinterpret_cast<int*>(ctx.shared_memory() + kGinCountersOffset);
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
    CROSSDOCK_DEVICE bool wait_word(const Ctx& ctx, const Operation& operation, WaitStep step, uint64_t word,
                                    uint32_t number) const {
        return wait_ring_word(ctx, c_, operation, step, peer_, reinterpret_cast<const uint64_t*>(at(word)), number);
    }
    CROSSDOCK_DEVICE Raise raise_of(uint64_t words, uint64_t raised, uint32_t word, uint64_t value) const {
        return {words + peer_words_ + 8 * word, raised + own_words_ + 8 * word, value};
    }

    const HtCommon& c_;
    int peer_;
    int counters_;  // this ring's first
    uint64_t own_words_;
    uint64_t peer_words_;
    uint64_t outbox_;
    uint64_t packets_here_;
    uint64_t packets_there_;
    const HtGinRings& rings_;
};

}  // namespace
}  // namespace crossdock
