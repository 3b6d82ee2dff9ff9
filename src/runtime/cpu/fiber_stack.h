// SPDX-License-Identifier: Apache-2.0
// Stacks of fibers: mapped memory with a guard page below, so that an overflow faults instead of corrupting memory.
#pragma once

#include <cstddef>

namespace crossdock::cpu {

// Returns the lowest usable byte of a stack of at least stack_bytes (rounded up to pages). Reuses stacks that this
// thread released. Throws ncclSystemError if there is no memory.
std::byte* acquire_stack(size_t stack_bytes);
void release_stack(std::byte* stack, size_t stack_bytes) noexcept;

}  // namespace crossdock::cpu
