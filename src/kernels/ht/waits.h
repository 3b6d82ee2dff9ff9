// SPDX-License-Identifier: Apache-2.0
// Waits of the high-throughput operations. Their ends depend on each other: a rank may wait for one that waits for a
// lost one itself. So that only the lost one is blamed, whoever waits for long says from time to time that it is alive,
// and a wait expires when its peer has been silent for the timeout. A rank whose group fails tells its peers who was
// to blame, and they fail at once, with the same name.
#pragma once

#include "kernels/ht/arguments.h"
#include "kernels/remote.h"

namespace crossdock {
inline namespace CROSSDOCK_WORLD {

// A wait that was vain at first. Times are 0 until the first look at the clock.
struct HtWait {
    uint64_t start_ns = 0;
    uint64_t heard_ns = 0;  // when the peer last said that it is alive
    uint64_t told_ns = 0;   // when this wait last did
    uint64_t heard = 0;
};
inline constexpr uint64_t kSignsOfLife = 4;  // in the time of a timeout

CROSSDOCK_DEVICE uint64_t* blame_word(const HtCommon& c, int owner) {
    return reinterpret_cast<uint64_t*>(c.peers.at(owner, c.offsets.alarms));
}
CROSSDOCK_DEVICE uint64_t* alive_word(const HtCommon& c, int owner, int writer) {
    return blame_word(c, owner) + 1 + writer;
}
// Never zero.
CROSSDOCK_DEVICE uint64_t pack_blame(int reporter, int culprit) {
    return uint64_t{1} << 63 | uint64_t{static_cast<uint32_t>(reporter)} << 32 | static_cast<uint32_t>(culprit);
}

// Two words a peer, taken in turn: nobody enters the operation after next before all have left this one.
CROSSDOCK_DEVICE uint64_t* entered_word(const HtCommon& c, const Operation& operation, int owner, int writer) {
    return reinterpret_cast<uint64_t*>(c.peers.at(owner, c.offsets.entered)) +
           (operation.epoch % 2 * c.arena.num_ranks + static_cast<uint32_t>(writer));
}

// How many timeouts a wait may last while its peer says that it is alive: lost ranks may cost peers one after the
// other. A rank that waits for itself waits for a part of it that waits for a peer: that part's time is over first.
CROSSDOCK_DEVICE uint64_t most_timeouts(const HtCommon& c, int peer) {
    const uint64_t ranks = c.arena.num_ranks;
    if (c.scope.masking == 0) return peer == c.rank ? 2 * (ranks + 1) : 2;
    return peer == c.rank ? 4 * (ranks + 1) : 2 * (ranks + 1);
}

CROSSDOCK_DEVICE_RARE void say_alive(const Ctx& ctx, const HtCommon& c) {
    const uint64_t sign = ctx.add_relaxed_device(&c.state->signs, 1) + 1;
    CROSSDOCK_ROLLED
    for (int peer = 0; peer < static_cast<int>(c.arena.num_ranks); ++peer) {
        if (peer == c.rank || !is_active(ctx, c.scope, peer)) continue;
        if (is_remote(c.reach, peer)) {
            put_value(ctx, c.reach, peer, c.offsets.alarms + 8 * (uint64_t{1} + static_cast<uint32_t>(c.rank)), sign);
        } else {
            ctx.store_relaxed_system(alive_word(c, peer, c.rank), sign);
        }
    }
}

// told: what another rank has said of it; 0: this one has waited itself.
CROSSDOCK_DEVICE_RARE void give_up(const Ctx& ctx, const HtCommon& c, const Operation& operation, WaitStep step,
                                   int peer, uint64_t expected, uint64_t seen, uint64_t told) {
    WaitScope scope = c.scope;
    if (peer == c.rank) scope.masking = 0;
    record_expired_wait(ctx, scope, operation, step, peer, expected, seen);
    if (scope.masking != 0) {
        // A lost rank that is only late must not take this one for present any more, and write to it.
        Operation other = operation;
        ++other.epoch;
        ctx.store_relaxed_system(entered_word(c, operation, peer, c.rank), 0);
        ctx.store_relaxed_system(entered_word(c, other, peer, c.rank), 0);
        return;
    }
    if (peer == c.rank) return;
    const uint64_t blame = told != 0 ? told : pack_blame(c.rank, peer);
    CROSSDOCK_ROLLED
    for (int other = 0; other < static_cast<int>(c.arena.num_ranks); ++other) {
        if (other == c.rank) continue;
        if (is_remote(c.reach, other)) {
            put_value(ctx, c.reach, other, c.offsets.alarms, blame);
        } else {
            ctx.store_release_system(blame_word(c, other), blame);
        }
    }
}

// After some vain polls. False: the peer is masked, the group has failed, or the wait's time is over.
CROSSDOCK_DEVICE_RARE bool may_wait_on(const Ctx& ctx, const HtCommon& c, const Operation& operation, HtWait& wait,
                                       WaitStep step, int peer, uint64_t expected, uint64_t seen) {
    const WaitScope& scope = c.scope;
    if (has_failed(ctx, scope) || (peer != c.rank && !is_active(ctx, scope, peer))) return false;
    const uint64_t now_ns = ctx.now_ns();
    const uint64_t heard = ctx.load_relaxed_system(alive_word(c, c.rank, peer));
    if (wait.start_ns == 0) wait = {now_ns, now_ns, now_ns, heard};
    if (heard != wait.heard) {
        wait.heard = heard;
        wait.heard_ns = now_ns;
    }
    const uint64_t blame = scope.masking != 0 ? 0 : ctx.load_acquire_system(blame_word(c, c.rank));
    if (blame != 0) {
        const int reporter = static_cast<int>(blame >> 32 & INT32_MAX);
        const int culprit = static_cast<int>(blame & UINT32_MAX);
        // Whoever is to blame itself names who has given it up.
        give_up(ctx, c, operation, WaitStep::kReport, culprit == c.rank ? reporter : culprit, expected,
                static_cast<uint64_t>(reporter), blame);
        return false;
    }
    const uint64_t last_ns = wait.start_ns + scope.timeout_ns * most_timeouts(c, peer);
    uint64_t deadline_ns = wait.heard_ns + scope.timeout_ns;
    if (deadline_ns > last_ns || peer == c.rank) deadline_ns = last_ns;
    if (now_ns >= deadline_ns) {
        give_up(ctx, c, operation, step, peer, expected, seen, 0);
        return false;
    }
    uint64_t next_ns = wait.told_ns + scope.timeout_ns / kSignsOfLife;
    if (now_ns >= next_ns) {
        say_alive(ctx, c);
        wait.told_ns = now_ns;
        next_ns = now_ns + scope.timeout_ns / kSignsOfLife + 1;
    }
    ctx.pause(next_ns < deadline_ns ? next_ns : deadline_ns);
    return true;
}

// Polls load() until ready(value). The calling lane; false: the peer is masked, the group has failed, or the time is
// over.
template <typename Load, typename Ready>
CROSSDOCK_DEVICE bool wait_for(const Ctx& ctx, const HtCommon& c, const Operation& operation, WaitStep step, int peer,
                               uint64_t expected, Load load, Ready ready) {
    if (ready(load())) return true;
    HtWait wait;
    return poll_until(ctx, load, ready,
                      [&](uint64_t seen) { return may_wait_on(ctx, c, operation, wait, step, peer, expected, seen); });
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
