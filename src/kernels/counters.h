// SPDX-License-Identifier: Apache-2.0
// Counters for the caller, as int32 or int64.
#pragma once

#include "device/context.h"

namespace crossdock {
namespace {

// counters may be null.
CROSSDOCK_DEVICE void write_counter(void* counters, bool is_64_bit, uint32_t at, uint32_t value) {
    if (counters == nullptr) return;
    if (is_64_bit) {
        static_cast<int64_t*>(counters)[at] = value;
    } else {
        static_cast<int32_t*>(counters)[at] = static_cast<int32_t>(value);
    }
}

}  // namespace
}  // namespace crossdock
