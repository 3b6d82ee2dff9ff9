// SPDX-License-Identifier: Apache-2.0
// What the layouts of both modes are made of.
#pragma once

#include "device/tagged_word.h"

namespace crossdock {

inline constexpr int kMaxTopk = 64;
inline constexpr uint64_t kPayloadBits = 24;  // of an announcing word; the other 40 hold the epoch
inline constexpr uint64_t kMaxPayload = (uint64_t{1} << kPayloadBits) - 1;

CROSSDOCK_HOST_DEVICE constexpr uint64_t align_up(uint64_t value, uint64_t alignment) {
    return (value + alignment - 1) / alignment * alignment;
}

// How many bits the numbers below `count` take.
CROSSDOCK_HOST_DEVICE constexpr uint32_t bits_below(uint32_t count) {
    uint32_t bits = 0;
    while (uint64_t{1} << bits < count) ++bits;
    return bits;
}

inline constexpr uint32_t kEpochBits = 64 - kPayloadBits;

// An announcing word: a reader that sees this epoch sees this payload, and a word of an earlier operation can never
// look new.
CROSSDOCK_HOST_DEVICE constexpr uint64_t pack_word(uint64_t epoch, uint64_t payload) {
    return epoch << kPayloadBits | payload;
}
CROSSDOCK_HOST_DEVICE constexpr uint64_t word_epoch(uint64_t word) { return word >> kPayloadBits; }
CROSSDOCK_HOST_DEVICE constexpr uint64_t word_payload(uint64_t word) { return word & kMaxPayload; }

}  // namespace crossdock
