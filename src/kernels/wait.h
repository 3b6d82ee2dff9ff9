// SPDX-License-Identifier: Apache-2.0
// Bounded waits of LL, A2SGD and mask cleans (HT: kernels/ht/waits.h). nccl_ep.h says how long they last at most. A
// wait that times out leaves a record for the host (device/wait_records.h); then the peer is masked, or the group
// fails.
#pragma once

#include "device/poll.h"
#include "device/wait_records.h"
#include "kernels/entry.h"
#include "kernels/wait_steps.h"

namespace crossdock {
namespace {

// Called after some failed polls. Returns false if the peer is masked or its process has ended, the group has failed,
// the peer passed other terms, or the wait has timed out.
CROSSDOCK_DEVICE_RARE bool may_go_on_waiting(const Ctx& ctx, const WaitScope& scope, Operation operation, WaitStep step,
                                             uint32_t peer, uint64_t expected, uint64_t seen) {
    uint64_t deadline_ns = operation.start_ns + scope.timeout_ns;
    if (has_failed(ctx, scope) || !is_active(ctx, scope, peer)) return false;
    if (scope.entries != nullptr && !expect_agreement(ctx, scope, operation, peer)) return false;
    const uint32_t named = ctx.rank_to_name(peer);
    // A peer that entered after this rank and waits for a lost one times out later than this rank: it is not lost.
    if (named == kNoRank && ctx.now_ns() >= deadline_ns && has_entered(ctx, scope, operation, peer))
        deadline_ns += scope.timeout_ns;
    // This rank may send to itself only after its waits for others have ended. It is never masked itself.
    const bool is_own = scope.masking != 0 && peer == scope.rank;
    if (is_own) deadline_ns += scope.timeout_ns;
    const bool is_interrupted = ctx.is_interrupted();
    if (named != kNoRank || is_interrupted || ctx.now_ns() >= deadline_ns) {
        WaitScope judge = scope;
        if (is_own || is_interrupted) judge.masking = 0;
        const uint32_t lost = lost_peer(scope, peer, named);
        if (is_interrupted) {
            step = WaitStep::kInterrupted;
        } else if (lost != peer) {
            step = WaitStep::kReport;
            seen = uint64_t{peer};
        }
        record_expired_wait(ctx, judge, operation, step, lost, expected, seen);
        if (judge.masking == 0 && !is_own && !is_interrupted) ctx.report_loss(lost);
        return false;
    }
    ctx.pause(deadline_ns);
    return true;
}

// Polls load() until ready(value). One lane. Returns false as may_go_on_waiting does. The timeout counts from the
// operation's start on this rank, so all its waits for ranks that have not come end together.
template <typename Load, typename Ready>
CROSSDOCK_DEVICE bool wait_until(const Ctx& ctx, const auto& scope, const Operation& operation, WaitStep step,
                                 uint32_t peer, uint64_t expected, Load load, Ready ready) {
    return poll_until(ctx, load, ready, [&](uint64_t seen) {
        return may_go_on_waiting(ctx, scope, operation, step, peer, expected, seen);
    });
}

// The same by a full warp. look(): the peer that keeps the warp waiting, or kNoRank; the same for all lanes. seen():
// the epoch found instead of this operation's, called by lane 0.
template <typename Look, typename Seen>
CROSSDOCK_DEVICE bool wait_as_warp(const Ctx& ctx, const auto& scope, const Operation& operation, WaitStep step,
                                   Look look, Seen seen) {
    CROSSDOCK_ROLLED
    for (;;) {
        uint32_t peer = kNoRank;
        CROSSDOCK_ROLLED
        for (int poll = 0; poll < Ctx::kPollsPerClockRead; ++poll) {
            peer = look();
            if (peer == kNoRank) return true;
        }
        const bool goes_on =
            is_leader(ctx) && may_go_on_waiting(ctx, scope, operation, step, peer, operation.epoch, seen());
        if (ctx.warp_broadcast(goes_on ? 1u : 0u) == 0) return false;
    }
}

}  // namespace
}  // namespace crossdock
