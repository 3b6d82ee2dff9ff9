// SPDX-License-Identifier: Apache-2.0
// Words that carry their own flag.
#pragma once

#include "device/platform.h"

namespace crossdock {

// An announcing word: a reader that sees this epoch sees this payload, and a word of an earlier operation never looks
// new.
inline constexpr uint64_t kPayloadBits = 24;
inline constexpr uint64_t kMaxPayload = (uint64_t{1} << kPayloadBits) - 1;
inline constexpr uint32_t kEpochBits = 64 - kPayloadBits;
// 127 days at 10 us per operation. No word has a later one, so its operation fails: its waits time out.
inline constexpr uint64_t kLastEpoch = (uint64_t{1} << kEpochBits) - 1;

CROSSDOCK_HOST_DEVICE constexpr uint64_t pack_word(uint64_t epoch, uint64_t payload) {
    return epoch << kPayloadBits | payload;
}
CROSSDOCK_HOST_DEVICE constexpr uint64_t word_epoch(uint64_t word) { return word >> kPayloadBits; }
CROSSDOCK_HOST_DEVICE constexpr uint64_t word_payload(uint64_t word) { return word & kMaxPayload; }

// A reader that sees the tag sees the payload: on a GPU both are in one store of 16 bytes, on a CPU the tag is stored
// last. Half of the bytes are tags, but no completion, fence or flag follows the data: the lowest latency for few
// bytes.
//
// Unlike the 128 bytes of an LL128 line, which a warp stores, 16 aligned bytes of one thread do not need NVLink: they
// are one access of the PTX memory model (.b128) and one write on PCIe, which a target applies in steps of at least 8
// aligned bytes in order of their addresses, so the tag, which is behind the payload, never comes first.
struct alignas(16) TaggedWord {
    uint64_t payload;
    uint64_t tag;
};

// Two payloads: the unit in which rows are moved.
struct alignas(16) Bytes16 {
    uint64_t low;
    uint64_t high;
};

}  // namespace crossdock
