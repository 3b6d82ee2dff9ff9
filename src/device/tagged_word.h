// SPDX-License-Identifier: Apache-2.0
// Data that says itself that it has arrived.
#pragma once

#include "device/platform.h"

namespace crossdock {

// Whoever sees the tag that it waits for sees the payload, too: on a GPU because both travel in one store of 16 bytes,
// on a CPU because the tag is stored last. Half of the wire is tags, and no completion, fence or flag follows the data:
// the shortest way for few bytes.
struct alignas(16) TaggedWord {
    uint64_t payload;
    uint64_t tag;
};

// Two payloads: what a row is moved by.
struct alignas(16) Bytes16 {
    uint64_t low;
    uint64_t high;
};

}  // namespace crossdock
