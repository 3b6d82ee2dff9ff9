// SPDX-License-Identifier: Apache-2.0
// What LL ranks tell each other when they enter an operation. Other modes have no entries: WaitScope::entries is null.
#pragma once

#include "device/wait_records.h"
#include "kernels/agreement.h"
#include "kernels/peer_numbers.h"

namespace crossdock {

// What a peer writes here when it enters an LL operation: its Terms (kernels/agreement.h), tagged with the epoch, a
// check of the terms, and its DirectPart bits. While this rank reads the entry, the peer may already write that of a
// later operation in the same buffer; the check detects a payload and a tag of different operations.
struct Entry {
    static constexpr uint32_t kPartBits = WindowTerm::kPartBits;
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

namespace {

CROSSDOCK_DEVICE TaggedWord load_entry(const Ctx& ctx, const auto& scope, const Operation& operation, uint32_t peer) {
    return ctx.load_tagged(reinterpret_cast<const TaggedWord*>(scope.entries + operation.base) + peer);
}

// The peer has entered this operation with the same terms, or a later one, so it has accepted this rank's.
CROSSDOCK_DEVICE bool has_entered_alike(const TaggedWord& entry, const auto& scope, const Operation& operation) {
    const uint64_t epoch = word_epoch(entry.tag);
    return epoch > operation.epoch || (epoch == operation.epoch && WindowTerm::are_alike(entry.payload, scope.terms));
}

// Fails the group and returns false if the peer has entered with other terms.
CROSSDOCK_DEVICE_RARE bool expect_agreement(const Ctx& ctx, const WaitScope& scope, Operation operation,
                                            uint32_t peer) {
    const TaggedWord entry = load_entry(ctx, scope, operation, peer);
    if (word_epoch(entry.tag) != operation.epoch || WindowTerm::are_alike(entry.payload, scope.terms) ||
        !Entry::is_whole(entry))
        return true;
    const bool is_of_windows = WindowTerm::only_windows_differ(entry.payload, scope.terms);
    record_peer_fault(ctx, scope, operation, PeerFaultKind::kDisagrees,
                      is_of_windows ? PeerNumber::kWindows : PeerNumber::kNone, peer, scope.terms, entry.payload);
    return false;
}

// With masks: the peer has entered this operation.
CROSSDOCK_DEVICE_RARE bool has_entered(const Ctx& ctx, const WaitScope& scope, Operation operation, uint32_t peer) {
    return scope.masking != 0 && scope.entries != nullptr &&
           word_epoch(load_entry(ctx, scope, operation, peer).tag) >= operation.epoch;
}

}  // namespace
}  // namespace crossdock
