// SPDX-License-Identifier: Apache-2.0
// Common to both modes' memory layouts.
#pragma once

#include "device/layout.h"
#include "device/tagged_word.h"

namespace crossdock {

inline constexpr int kMaxTopk = 64;

// Bits of the numbers below `count`.
CROSSDOCK_HOST_DEVICE constexpr uint32_t bits_below(uint32_t count) {
    uint32_t bits = 0;
    while (uint64_t{1} << bits < count) ++bits;
    return bits;
}

}  // namespace crossdock
