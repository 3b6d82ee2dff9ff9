// SPDX-License-Identifier: Apache-2.0
// Waits of HT operations. They depend on each other: a rank may wait for one that waits for a lost one itself. So that
// only the lost rank is named, ranks that wait long send heartbeats, and a wait expires when its peer has sent none for
// the timeout. A rank whose group fails sends its peers a failure report, and they fail at once and name the same rank.
#pragma once

#include "device/poll.h"
#include "kernels/ht/arguments.h"
#include "kernels/peer_numbers.h"
#include "kernels/remote.h"

namespace crossdock {
namespace {

// A wait whose first poll failed. Times are 0 until the clock is first read.
struct HtWait {
    uint64_t start_ns = 0;
    uint64_t heard_ns = 0;  // when the peer's last heartbeat was seen
    uint64_t told_ns = 0;   // when this wait last sent a heartbeat
    uint64_t heard = 0;
};
inline constexpr uint64_t kHeartbeats = 4;  // per timeout

CROSSDOCK_DEVICE uint64_t* report_word(const HtCommon& c, uint32_t owner) {
    return c.peers.at(owner, c.offsets.alarms);
}
CROSSDOCK_DEVICE uint64_t* heartbeat_word(const HtCommon& c, uint32_t owner, uint32_t writer) {
    return report_word(c, owner) + 1 + writer;
}
// The report of a rank whose group fails: the lost rank, and whether it timed out or announced a wrong number.
struct FailureReport {
    bool exists;
    bool is_refusal;
    uint32_t reporter;
    uint32_t lost;

    // Never zero.
    CROSSDOCK_DEVICE uint64_t pack() const {
        return uint64_t{1} << 63 | uint64_t{is_refusal} << 62 | uint64_t{reporter} << 32 | lost;
    }
    // An invalid word is no report.
    CROSSDOCK_DEVICE static FailureReport of(const HtCommon& c, uint64_t word) {
        const uint64_t reporter = word >> 32 & ((uint64_t{1} << 30) - 1);
        const uint64_t lost = word & UINT32_MAX;
        const bool exists = word >> 63 != 0 && reporter < c.arena.num_ranks && lost < c.arena.num_ranks;
        return {exists, (word >> 62 & 1) != 0, static_cast<uint32_t>(reporter), static_cast<uint32_t>(lost)};
    }
};

// Two words per peer, used in turn: no rank enters the operation after the next before all have left this one.
CROSSDOCK_DEVICE uint64_t* entered_word(const HtCommon& c, const Operation& operation, uint32_t owner,
                                        uint32_t writer) {
    return c.peers.at(owner, c.offsets.entered) + (operation.epoch % 2 * c.arena.num_ranks + writer);
}
// The terms of a rank that has entered, likewise.
CROSSDOCK_DEVICE uint64_t terms_offset(const HtCommon& c, const Operation& operation, uint32_t writer) {
    return c.offsets.terms.offset + sizeof(TaggedWord) * (operation.epoch % 2 * c.arena.num_ranks + writer);
}
CROSSDOCK_DEVICE TaggedWord* terms_word(const HtCommon& c, const Operation& operation, uint32_t owner,
                                        uint32_t writer) {
    return reinterpret_cast<TaggedWord*>(c.peers.at(owner, terms_offset(c, operation, writer)));
}

// How many timeouts a wait may last while its peer sends heartbeats (nccl_ep.h): lost ranks may cost peers one after
// the other. A rank that waits for itself waits for a part of it that waits for a peer: that part times out first.
CROSSDOCK_DEVICE uint64_t most_timeouts(const HtCommon& c, uint32_t peer) {
    const uint64_t ranks = c.arena.num_ranks;
    if (c.scope.masking == 0) return peer == c.rank ? 2 * (ranks + 1) : 2;
    return peer == c.rank ? 4 * (ranks + 1) : 2 * (ranks + 1);
}

CROSSDOCK_DEVICE_RARE void send_heartbeat(const Ctx& ctx, const HtCommon& c) {
    const uint64_t heartbeat = ctx.add_relaxed_device(&c.state->heartbeats, 1) + 1;
    CROSSDOCK_ROLLED
    for (uint32_t peer = 0; peer < c.arena.num_ranks; ++peer) {
        if (peer == c.rank || !is_active(ctx, c.scope, peer)) continue;
        if (is_remote(c.reach, peer)) {
            put_value(ctx, c.reach, peer, c.offsets.alarms.offset + 8 * (uint64_t{1} + c.rank), heartbeat);
        } else {
            ctx.store_relaxed_system(heartbeat_word(c, peer, c.rank), heartbeat);
        }
    }
}

// The scope for recording a lost peer: this rank itself is never masked.
CROSSDOCK_DEVICE WaitScope scope_of_peer(const HtCommon& c, uint32_t peer) {
    WaitScope scope = c.scope;
    if (peer == c.rank) scope.masking = 0;
    return scope;
}

// After the record is written. With masks the peer is told that it is masked, otherwise all others get the failure
// report.
CROSSDOCK_DEVICE_RARE void leave_peer(const Ctx& ctx, const HtCommon& c, const Operation& operation, uint32_t peer,
                                      uint64_t report) {
    if (peer == c.rank) return;
    if (c.scope.masking != 0) {
        // A masked rank that was only late must not consider this rank entered and write to it.
        Operation other = operation;
        ++other.epoch;
        ctx.store_relaxed_system(entered_word(c, operation, peer, c.rank), 0);
        ctx.store_relaxed_system(entered_word(c, other, peer, c.rank), 0);
        return;
    }
    CROSSDOCK_ROLLED
    for (uint32_t other = 0; other < c.arena.num_ranks; ++other) {
        if (other == c.rank) continue;
        if (is_remote(c.reach, other)) {
            put_value(ctx, c.reach, other, c.offsets.alarms.offset, report);
        } else {
            ctx.store_release_system(report_word(c, other), report);
        }
    }
}

// told: another rank's report; 0: this rank's own wait timed out.
CROSSDOCK_DEVICE_RARE void give_up(const Ctx& ctx, const HtCommon& c, const Operation& operation, WaitStep step,
                                   uint32_t peer, uint64_t expected, uint64_t seen, uint64_t told) {
    record_expired_wait(ctx, scope_of_peer(c, peer), operation, step, peer, expected, seen);
    if (c.scope.masking == 0 && peer != c.rank) ctx.report_loss(peer);
    leave_peer(ctx, c, operation, peer, told != 0 ? told : FailureReport{true, false, c.rank, peer}.pack());
}

// A number of the peer is larger than `most`, so its data must not be used.
CROSSDOCK_DEVICE_RARE void refuse_number(const Ctx& ctx, const HtCommon& c, const Operation& operation,
                                         PeerNumber number, uint32_t peer, uint64_t most, uint64_t seen) {
    record_peer_fault(ctx, scope_of_peer(c, peer), operation, PeerFaultKind::kOutOfRange, number, peer, most, seen);
    leave_peer(ctx, c, operation, peer, FailureReport{true, true, c.rank, peer}.pack());
}

// Called after some failed polls. Returns false if the peer is masked, the group has failed or the wait has timed out.
CROSSDOCK_DEVICE_RARE bool may_wait_on(const Ctx& ctx, const HtCommon& c, const Operation& operation, HtWait& wait,
                                       WaitStep step, uint32_t peer, uint64_t expected, uint64_t seen) {
    const WaitScope& scope = c.scope;
    if (has_failed(ctx, scope) || (peer != c.rank && !is_active(ctx, scope, peer))) return false;
    const uint64_t now_ns = ctx.now_ns();
    const uint64_t heard = ctx.load_relaxed_system(heartbeat_word(c, c.rank, peer));
    if (wait.start_ns == 0) wait = {now_ns, now_ns, now_ns, heard};
    if (heard != wait.heard) {
        wait.heard = heard;
        wait.heard_ns = now_ns;
    }
    const uint64_t word = scope.masking != 0 ? 0 : ctx.load_acquire_system(report_word(c, c.rank));
    const FailureReport report = FailureReport::of(c, word);
    if (report.exists) {
        // If this rank is reported as lost, it names the reporter.
        give_up(ctx, c, operation, report.is_refusal ? WaitStep::kRefused : WaitStep::kReport,
                report.lost == c.rank ? report.reporter : report.lost, expected, report.reporter, word);
        return false;
    }
    const uint64_t last_ns = wait.start_ns + scope.timeout_ns * most_timeouts(c, peer);
    uint64_t deadline_ns = wait.heard_ns + scope.timeout_ns;
    if (deadline_ns > last_ns || peer == c.rank) deadline_ns = last_ns;
    const uint32_t named = ctx.rank_to_name(peer);
    if (ctx.is_interrupted()) {
        WaitScope judge = scope;
        judge.masking = 0;
        record_expired_wait(ctx, judge, operation, WaitStep::kInterrupted, peer, expected, seen);
        return false;
    }
    if (named != kNoRank || now_ns >= deadline_ns) {
        const uint32_t lost = lost_peer(scope, peer, named);
        give_up(ctx, c, operation, lost == peer ? step : WaitStep::kReport, lost, expected, lost == peer ? seen : peer,
                0);
        return false;
    }
    uint64_t next_ns = wait.told_ns + scope.timeout_ns / kHeartbeats;
    if (now_ns >= next_ns) {
        send_heartbeat(ctx, c);
        wait.told_ns = now_ns;
        next_ns = now_ns + scope.timeout_ns / kHeartbeats + 1;
    }
    ctx.pause(next_ns < deadline_ns ? next_ns : deadline_ns);
    return true;
}

// Polls load() until ready(value). One lane. Returns false as may_wait_on does.
template <typename Load, typename Ready>
CROSSDOCK_DEVICE bool wait_for(const Ctx& ctx, const HtCommon& c, const Operation& operation, WaitStep step,
                               uint32_t peer, uint64_t expected, Load load, Ready ready) {
    if (ready(load())) return true;
    HtWait wait;
    return poll_until(ctx, load, ready,
                      [&](uint64_t seen) { return may_wait_on(ctx, c, operation, wait, step, peer, expected, seen); });
}

// The same for a tagged word of this operation.
CROSSDOCK_DEVICE bool wait_tagged_word(const Ctx& ctx, const HtCommon& c, const Operation& operation, WaitStep step,
                                       uint32_t peer, const TaggedWord* word, uint64_t& payload) {
    TaggedWord seen{};
    const bool came = wait_for(
        ctx, c, operation, step, peer, operation.epoch,
        [&] {
            seen = ctx.load_tagged(word);
            return word_epoch(seen.tag);
        },
        [&](uint64_t epoch) { return epoch == operation.epoch; });
    payload = seen.payload;
    return came;
}

// The same for a ring's word about packet (of GinRing's credits: batch) `number`. A diagnosis counts packets from 1; 0:
// none in this operation.
CROSSDOCK_DEVICE bool wait_ring_word(const Ctx& ctx, const HtCommon& c, const Operation& operation, WaitStep step,
                                     uint32_t peer, const uint64_t* word, uint32_t number) {
    const uint64_t expected = pack_word(operation.epoch, number);
    const auto load = [&] { return ctx.load_acquire_system(word); };
    const auto ready = [&](uint64_t seen) { return seen == expected; };
    if (ready(load())) return true;
    HtWait wait;
    return poll_until(ctx, load, ready, [&](uint64_t seen) {
        const uint64_t number_seen = word_epoch(seen) == operation.epoch ? word_payload(seen) + 1 : 0;
        return may_wait_on(ctx, c, operation, wait, step, peer, uint64_t{number} + 1, number_seen);
    });
}

}  // namespace
}  // namespace crossdock
