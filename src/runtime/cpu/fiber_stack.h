// SPDX-License-Identifier: Apache-2.0
// Stacks of fibers: mapped memory with an inaccessible page below, so that an overflow faults instead of corrupting a
// neighbour.
#pragma once

#include <cstddef>

namespace crossdock::cpu {

// The lowest usable byte of a stack of at least stack_bytes (rounded up to pages). Reuses what this thread released
// before. Error with ncclSystemError when the system has none left.
std::byte* acquire_stack(size_t stack_bytes);
void release_stack(std::byte* stack, size_t stack_bytes) noexcept;

}  // namespace crossdock::cpu
