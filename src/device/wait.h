// SPDX-License-Identifier: Apache-2.0
// Bounded waits on words that other ranks write: the only loops in the library that poll memory. A wait that expires
// says who waited for whom, in which operation and step, what was expected and what was seen; then the peer is masked,
// or the group fails.
#pragma once

#include "device/context.h"

namespace crossdock {

// Which operation waits, and for what. kernels/wait_steps.h gives these numbers their meanings.
enum class OperationKind : uint32_t;
enum class WaitStep : uint32_t;

// `claimed` of a record: 0: free; whoever counts it up from there writes the rest, and then adds this.
inline constexpr uint32_t kRecordWritten = uint32_t{1} << 30;

// Written by kernels in host-visible memory, once per group: the first wait that expires after the host last cleared
// `claimed`.
struct ExpiredWait {
    uint32_t claimed;
    uint32_t complete;
    OperationKind operation;
    WaitStep step;
    uint32_t peer;
    uint32_t reserved;
    uint64_t handle;
    uint64_t epoch;
    uint64_t expected;
    uint64_t seen;
    uint64_t elapsed_ns;
};

// More rows came to a rank than it has room for, with a policy that makes this an error; the first one seen.
struct Overflow {
    uint32_t claimed;
    uint32_t complete;
    uint32_t rank;  // whose budget it was
    uint32_t total;
    uint32_t budget;
};

// What a rank can see in a peer's words that no rank of this library that was called alike would write.
enum class PeerFaultKind : uint32_t {
    kNone,
    kDisagrees,   // seen, expected: both ranks' Terms (kernels/agreement.h)
    kOutOfRange,  // seen: the number; expected: the largest one allowed
};
enum class PeerNumber : uint32_t {
    kNone,
    kRows,
    kChoices,
    kToken,
    kTarget,
    kRowOfExpert,
    kExpert,
    kTokens,
    kBase,
    kMask,
    kExpertsOfToken,
    kWindowOffset,  // high throughput; of kDisagrees: folded_window_offset (kernels/agreement.h)
    kWindows,       // of kDisagrees: hashes of where both ranks' tensors lie in their windows
    kEndInWindow
};

// The first fault that this rank saw in a peer's words.
struct PeerFault {
    uint32_t claimed;
    uint32_t complete;
    PeerFaultKind kind;
    PeerNumber number;  // of kOutOfRange: what it counts
    OperationKind operation;
    uint32_t peer;
    uint64_t handle;
    uint64_t epoch;
    uint64_t expected;
    uint64_t seen;
};

// The group's words that the host reads without touching the device.
struct HostVisibleStatus {
    // Not zero: an expired wait or a fault without masks, no free buffer, or an overflow, and the record of it is
    // complete: the group has failed.
    uint32_t failed;
    uint32_t async_error;  // an expired wait or a fault with masks
    ExpiredWait expired;
    Overflow overflow;
    PeerFault fault;
};

// The group's words in device memory that every wait consults.
struct WaitControl {
    uint32_t failed;
    uint32_t losses;  // grows with every peer that an expired wait masks
};

// What a peer writes here when it comes to a low-latency operation: its Terms (kernels/agreement.h), tagged by the
// operation with a check of them and its DirectPart bits. A peer that has nothing to wait for may come to a later
// operation of the same buffer while this rank looks: then the check tells terms and tags that do not belong together.
struct Entry {
    static constexpr uint32_t kPartBits = 2;
    static constexpr uint32_t kCheckBits = static_cast<uint32_t>(kPayloadBits) - kPartBits;

    CROSSDOCK_HOST_DEVICE static constexpr uint64_t check_of(uint64_t terms) {
        return terms * 0x9E3779B97F4A7C15 >> (64 - kCheckBits);
    }
    CROSSDOCK_HOST_DEVICE static constexpr uint64_t tag(uint64_t epoch, uint64_t terms, uint32_t parts) {
        return pack_word(epoch, check_of(terms) << kPartBits | parts);
    }
    CROSSDOCK_HOST_DEVICE static constexpr bool is_whole(const TaggedWord& word) {
        return word_payload(word.tag) >> kPartBits == check_of(word.payload);
    }
    CROSSDOCK_HOST_DEVICE static constexpr uint32_t parts(const TaggedWord& word) {
        return static_cast<uint32_t>(word.tag) & ((1u << kPartBits) - 1);
    }
};

// The upper bits of a low-latency dispatch's terms: which parts of the rank's outputs peers may write straight, and a
// hash of where these lie in their windows; 0: none. Peers write at their own offsets, so ranks that offer the same
// parts must agree. Ranks that offer others write nothing of each other's.
struct WindowTerm {
    static constexpr uint32_t kBits = 17;
    static constexpr uint32_t kPartBits = Entry::kPartBits;
    static constexpr uint32_t kShift = 64 - kBits;

    CROSSDOCK_HOST_DEVICE static constexpr bool only_windows_differ(uint64_t terms, uint64_t others) {
        return (terms ^ others) << kBits == 0;
    }
    // Both ranks may pass these: they are the same but for windows that neither reaches.
    CROSSDOCK_HOST_DEVICE static constexpr bool are_alike(uint64_t terms, uint64_t others) {
        const uint64_t differ = terms ^ others;
        constexpr uint64_t kParts = (uint64_t{1} << kPartBits) - 1;
        return differ == 0 || (differ << kBits == 0 && (differ >> kShift & kParts) != 0);
    }
};

// Who is waiting, by value in every kernel's arguments.
struct WaitScope {
    OperationKind operation;
    uint32_t masking;  // 1: an expired wait masks its peer; 0: it fails the group
    uint64_t handle;
    uint64_t timeout_ns;
    WaitControl* control;
    uint32_t* mask;  // [ranks], 1 active, 0 masked; device memory
    HostVisibleStatus* status;
    // Low latency: what this rank enters operations with, and where its peers' entries are, Operation::base added; null
    // elsewhere.
    uint64_t terms;
    const std::byte* entries;
    int rank;
};

namespace {

// One operation of one rank, as its kernel sees it.
struct Operation {
    uint64_t epoch = 0;
    int buffer = 0;
    uint64_t base = 0;       // where the buffer begins in every arena
    uint64_t free_from = 0;  // a peer that has entered this operation no longer reads that buffer
    uint64_t start_ns = 0;
    uint32_t losses_at_start = 0;
};

CROSSDOCK_DEVICE bool is_active(const Ctx& ctx, const auto& scope, int peer) {
    if (scope.masking == 0 || ctx.load_relaxed_device(scope.mask + peer) != 0) return true;
    ctx.note_unread_slots_allowed();
    return false;
}

CROSSDOCK_DEVICE bool has_failed(const Ctx& ctx, const auto& scope) {
    return ctx.is_killed() || ctx.load_relaxed_device(&scope.control->failed) != 0;
}

CROSSDOCK_DEVICE_RARE void tell_host_of_failure(const Ctx& ctx, const WaitScope& scope) {
    ctx.fence_system();
    ctx.add_acq_rel_device(&scope.status->failed, 1);
    ctx.fence_system();
}

// Every later wait of this rank ends, and every later call fails. claimed: of the record that says why. Who fails the
// group and who writes the record may be two: the later one tells the host, which so finds the record complete.
CROSSDOCK_DEVICE_RARE void fail_group(const Ctx& ctx, const WaitScope& scope, uint32_t* claimed) {
    ctx.store_relaxed_device(&scope.control->failed, 1);
    if (ctx.add_acq_rel_device(claimed, 0) >= kRecordWritten) tell_host_of_failure(ctx, scope);
}

CROSSDOCK_DEVICE_RARE void complete_record(const Ctx& ctx, const WaitScope& scope, uint32_t* claimed,
                                           uint32_t* complete) {
    ctx.fence_system();
    ctx.store_relaxed_device(complete, 1);
    ctx.add_acq_rel_device(claimed, kRecordWritten);
    if (ctx.load_relaxed_device(&scope.control->failed) != 0) tell_host_of_failure(ctx, scope);
}

CROSSDOCK_DEVICE_RARE void mask_peer(const Ctx& ctx, const WaitScope& scope, int peer) {
    // The loss is counted first: a reader that sees the peer masked at an operation's end sees the count, too.
    ctx.add_acq_rel_device(&scope.control->losses, 1);
    ctx.store_relaxed_device(scope.mask + peer, 0);
    ctx.store_relaxed_device(&scope.status->async_error, 1);
    ctx.fence_system();
}

CROSSDOCK_DEVICE_RARE void record_expired_wait(const Ctx& ctx, const WaitScope& scope, Operation operation,
                                               WaitStep step, int peer, uint64_t expected, uint64_t seen) {
    ExpiredWait& record = scope.status->expired;
    if (ctx.add_acq_rel_device(&record.claimed, 1) == 0) {
        record.operation = scope.operation;
        record.step = step;
        record.peer = static_cast<uint32_t>(peer);
        record.handle = scope.handle;
        record.epoch = operation.epoch;
        record.expected = expected;
        record.seen = seen;
        record.elapsed_ns = ctx.now_ns() - operation.start_ns;
        complete_record(ctx, scope, &record.claimed, &record.complete);
    }
    if (scope.masking != 0) {
        mask_peer(ctx, scope, peer);
    } else {
        fail_group(ctx, scope, &record.claimed);
    }
}

// A peer's words cannot be used. Ranks that disagree fail the group: masks leave out ranks that are lost, not calls
// that are wrong. A number out of range is taken for a loss where masks are on.
CROSSDOCK_DEVICE_RARE void record_peer_fault(const Ctx& ctx, const WaitScope& scope, Operation operation,
                                             PeerFaultKind kind, PeerNumber number, int peer, uint64_t expected,
                                             uint64_t seen) {
    PeerFault& record = scope.status->fault;
    if (ctx.add_acq_rel_device(&record.claimed, 1) == 0) {
        record.kind = kind;
        record.number = number;
        record.operation = scope.operation;
        record.peer = static_cast<uint32_t>(peer);
        record.handle = scope.handle;
        record.epoch = operation.epoch;
        record.expected = expected;
        record.seen = seen;
        complete_record(ctx, scope, &record.claimed, &record.complete);
    }
    if (scope.masking != 0 && kind == PeerFaultKind::kOutOfRange) {
        mask_peer(ctx, scope, peer);
    } else {
        fail_group(ctx, scope, &record.claimed);
    }
}

CROSSDOCK_DEVICE_RARE void record_overflow(const Ctx& ctx, const WaitScope& scope, int rank, uint32_t total,
                                           uint32_t budget) {
    Overflow& record = scope.status->overflow;
    if (ctx.add_acq_rel_device(&record.claimed, 1) == 0) {
        record.rank = static_cast<uint32_t>(rank);
        record.total = total;
        record.budget = budget;
        complete_record(ctx, scope, &record.claimed, &record.complete);
    }
    fail_group(ctx, scope, &record.claimed);
}

CROSSDOCK_DEVICE TaggedWord load_entry(const Ctx& ctx, const auto& scope, const Operation& operation, int peer) {
    return ctx.load_tagged(reinterpret_cast<const TaggedWord*>(scope.entries + operation.base) + peer);
}

// The peer has entered this operation with the same terms; or a later one, so that it has found this rank's right.
CROSSDOCK_DEVICE bool has_entered_alike(const TaggedWord& entry, const auto& scope, const Operation& operation) {
    const uint64_t epoch = word_epoch(entry.tag);
    return epoch > operation.epoch || (epoch == operation.epoch && WindowTerm::are_alike(entry.payload, scope.terms));
}

// False: the peer has come with other terms, and the group has failed.
CROSSDOCK_DEVICE_RARE bool expect_agreement(const Ctx& ctx, const WaitScope& scope, Operation operation, int peer) {
    const TaggedWord entry = load_entry(ctx, scope, operation, peer);
    if (word_epoch(entry.tag) != operation.epoch || WindowTerm::are_alike(entry.payload, scope.terms) ||
        !Entry::is_whole(entry))
        return true;
    const bool is_of_windows = WindowTerm::only_windows_differ(entry.payload, scope.terms);
    record_peer_fault(ctx, scope, operation, PeerFaultKind::kDisagrees,
                      is_of_windows ? PeerNumber::kWindows : PeerNumber::kNone, peer, scope.terms, entry.payload);
    return false;
}

// The rank that a wait gives up if the peer's process has ended: without masks, the rank that ended first.
CROSSDOCK_DEVICE int lost_peer(const WaitScope& scope, int peer, int first_ended) {
    return first_ended < 0 || scope.masking != 0 ? peer : first_ended;
}

// Low latency with masks: the peer has come to this operation.
CROSSDOCK_DEVICE_RARE bool has_entered(const Ctx& ctx, const WaitScope& scope, Operation operation, int peer) {
    return scope.masking != 0 && scope.entries != nullptr &&
           word_epoch(load_entry(ctx, scope, operation, peer).tag) >= operation.epoch;
}

// After some failed polls. False: the peer is masked or its process has ended, the group has failed, the peer passed
// other terms, or the operation's time is over.
CROSSDOCK_DEVICE_RARE bool may_go_on_waiting(const Ctx& ctx, const WaitScope& scope, Operation operation, WaitStep step,
                                             int peer, uint64_t expected, uint64_t seen) {
    uint64_t deadline_ns = operation.start_ns + scope.timeout_ns;
    if (has_failed(ctx, scope) || !is_active(ctx, scope, peer)) return false;
    if (scope.entries != nullptr && !expect_agreement(ctx, scope, operation, peer)) return false;
    const int first_ended = ctx.first_ended(peer);
    // A peer that came to the operation after this rank, and waits for a lost one, waits longer: it is not lost.
    if (first_ended < 0 && ctx.now_ns() >= deadline_ns && has_entered(ctx, scope, operation, peer))
        deadline_ns += scope.timeout_ns;
    // This rank may send to itself only when its waits for others have ended. It is never masked itself.
    const bool is_own = scope.masking != 0 && peer == scope.rank;
    if (is_own) deadline_ns += scope.timeout_ns;
    if (first_ended >= 0 || ctx.now_ns() >= deadline_ns) {
        WaitScope judge = scope;
        if (is_own) judge.masking = 0;
        record_expired_wait(ctx, judge, operation, step, lost_peer(scope, peer, first_ended), expected, seen);
        return false;
    }
    ctx.pause(deadline_ns);
    return true;
}

// Polls load() until ready(value), by the calling lane alone; after some failed polls calls may_go_on(value). False: it
// may not.
template <typename Load, typename Ready, typename MayGoOn>
CROSSDOCK_DEVICE bool poll_until(const Ctx&, Load load, Ready ready, MayGoOn may_go_on) {
    CROSSDOCK_ROLLED
    for (;;) {
        uint64_t seen = 0;
        CROSSDOCK_ROLLED
        for (int poll = 0; poll < Ctx::kPollsPerClockRead; ++poll) {
            seen = load();
            if (ready(seen)) return true;
        }
        if (!may_go_on(seen)) return false;
    }
}

// The same. False: the peer is masked or its process has ended, the group has failed, or the time that the operation
// has (from its start on this rank, so that all its waits for ranks that have not come end together) is over.
template <typename Load, typename Ready>
CROSSDOCK_DEVICE bool wait_until(const Ctx& ctx, const auto& scope, const Operation& operation, WaitStep step, int peer,
                                 uint64_t expected, Load load, Ready ready) {
    return poll_until(ctx, load, ready, [&](uint64_t seen) {
        return may_go_on_waiting(ctx, scope, operation, step, peer, expected, seen);
    });
}

// The same by a warp as one: all lanes look, and all see the same of look's answer, which is the peer that keeps them
// waiting, or -1. seen(): the epoch that is there instead of this operation's, asked of the first lane.
template <typename Look, typename Seen>
CROSSDOCK_DEVICE bool wait_as_warp(const Ctx& ctx, const auto& scope, const Operation& operation, WaitStep step,
                                   Look look, Seen seen) {
    CROSSDOCK_ROLLED
    for (;;) {
        int peer = -1;
        CROSSDOCK_ROLLED
        for (int poll = 0; poll < Ctx::kPollsPerClockRead; ++poll) {
            peer = look();
            if (peer < 0) return true;
        }
        const bool goes_on =
            is_leader(ctx) && may_go_on_waiting(ctx, scope, operation, step, peer, operation.epoch, seen());
        if (ctx.warp_broadcast(goes_on ? 1u : 0u) == 0) return false;
    }
}

}  // namespace
}  // namespace crossdock
