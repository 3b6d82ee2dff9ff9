// SPDX-License-Identifier: Apache-2.0
// The records that a wait for another rank leaves if it times out: which rank waited for which, in which operation and
// step, what was expected and what was seen. Then the peer is masked, or the group fails.
#pragma once

#include "device/context.h"

namespace crossdock {

// Which operation waits, for what, and which number of a peer is wrong: kernels/wait_steps.h, kernels/peer_numbers.h.
enum class OperationKind : uint32_t;
enum class WaitStep : uint32_t;
enum class PeerNumber : uint32_t;

// `claimed` of a record. 0: free. The thread that increments it from 0 writes the record, then adds kRecordWritten.
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

// The first time that more rows came to a rank than it has room for, with a policy that makes this an error.
struct Overflow {
    uint32_t claimed;
    uint32_t complete;
    uint32_t rank;  // whose budget it was
    uint32_t total;
    uint32_t budget;
    OperationKind operation;
};

// What a peer's words show that a rank of this library, called with the same arguments, never writes.
enum class PeerFaultKind : uint32_t {
    kNone,
    kDisagrees,   // seen, expected: both ranks' Terms (kernels/agreement.h)
    kOutOfRange,  // seen: the number; expected: the largest one allowed
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
    uint32_t losses;  // grows twice with every peer that an expired wait masks
};

// The rank that waits, by value in every kernel's arguments.
struct WaitScope {
    OperationKind operation;
    uint32_t masking;  // 1: an expired wait masks its peer; 0: it fails the group
    uint64_t handle;
    uint64_t timeout_ns;
    WaitControl* control;
    uint32_t* mask;  // [ranks], 1 active, 0 masked; device memory
    HostVisibleStatus* status;
    // LL: this rank's terms, and where its peers' entries are (plus Operation::base). Null in other modes.
    uint64_t terms;
    const std::byte* entries;
    uint32_t rank;
};

namespace {

// One operation of one rank, as its kernel sees it.
struct Operation {
    uint64_t epoch = 0;
    uint32_t buffer = 0;
    uint64_t base = 0;       // where the buffer begins in every arena
    uint64_t free_from = 0;  // a peer that has entered this operation no longer reads that buffer
    uint64_t start_ns = 0;
};

CROSSDOCK_DEVICE bool is_active(const Ctx& ctx, const auto& scope, uint32_t peer) {
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

// Ends every later wait of this rank and fails every later call. claimed: of the record that says why. Two different
// threads may fail the group and write the record; the later one notifies the host, which then finds it complete.
CROSSDOCK_DEVICE_RARE void fail_group(const Ctx& ctx, const WaitScope& scope, uint32_t* claimed) {
    ctx.note_unread_slots_allowed();  // first: other warps stop as soon as the group has failed
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

CROSSDOCK_DEVICE_RARE void mask_peer(const Ctx& ctx, const WaitScope& scope, uint32_t peer) {
    ctx.note_unread_slots_allowed();  // first, as in fail_group
    // Counted before and after: who has read the mask after a count, and later finds the same count, has its latest
    // state.
    ctx.add_acq_rel_device(&scope.control->losses, 1);
    ctx.store_relaxed_device(scope.mask + peer, 0);
    ctx.add_acq_rel_device(&scope.control->losses, 1);
    ctx.store_relaxed_device(&scope.status->async_error, 1);
    ctx.fence_system();
}

CROSSDOCK_DEVICE_RARE void record_expired_wait(const Ctx& ctx, const WaitScope& scope, Operation operation,
                                               WaitStep step, uint32_t peer, uint64_t expected, uint64_t seen) {
    ExpiredWait& record = scope.status->expired;
    if (ctx.add_acq_rel_device(&record.claimed, 1) == 0) {
        record.operation = scope.operation;
        record.step = step;
        record.peer = peer;
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

// A peer's words cannot be used. Ranks that disagree fail the group: masks exclude lost ranks, not wrong calls. With
// masks, a number out of range counts as a loss.
CROSSDOCK_DEVICE_RARE void record_peer_fault(const Ctx& ctx, const WaitScope& scope, Operation operation,
                                             PeerFaultKind kind, PeerNumber number, uint32_t peer, uint64_t expected,
                                             uint64_t seen) {
    PeerFault& record = scope.status->fault;
    if (ctx.add_acq_rel_device(&record.claimed, 1) == 0) {
        record.kind = kind;
        record.number = number;
        record.operation = scope.operation;
        record.peer = peer;
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

CROSSDOCK_DEVICE_RARE void record_overflow(const Ctx& ctx, const WaitScope& scope, uint32_t rank, uint32_t total,
                                           uint32_t budget) {
    Overflow& record = scope.status->overflow;
    if (ctx.add_acq_rel_device(&record.claimed, 1) == 0) {
        record.rank = rank;
        record.total = total;
        record.budget = budget;
        record.operation = scope.operation;
        complete_record(ctx, scope, &record.claimed, &record.complete);
    }
    fail_group(ctx, scope, &record.claimed);
}

// The rank that a wait for the peer reports as lost. named: what ctx.rank_to_name(peer) returned. With masks each rank
// is masked by itself.
CROSSDOCK_DEVICE uint32_t lost_peer(const WaitScope& scope, uint32_t peer, uint32_t named) {
    return named == kNoRank || scope.masking != 0 ? peer : named;
}

}  // namespace
}  // namespace crossdock
