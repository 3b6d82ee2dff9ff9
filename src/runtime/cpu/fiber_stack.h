// SPDX-License-Identifier: Apache-2.0
// Stacks of fibers: mapped memory with a guard below, so that an overflow faults instead of corrupting memory.
// Compilers touch a large frame anywhere, so the guard must be larger than any frame. It takes only addresses.
#pragma once

#include <cstddef>

namespace crossdock::cpu {

inline constexpr size_t kGuardBytes = 16 << 20;  // a GPU's threads have at most 512 KiB of local memory

// Throws ncclSystemError if so many stacks more would come close to the number of mappings that a process may have,
// before it has taken the mappings that others need.
void expect_room_for_stacks(size_t count);

// Returns the lowest usable byte of a stack of at least stack_bytes (rounded up to pages). Reuses stacks that this
// thread released. Throws ncclSystemError if there is no memory, or too many mappings: each stack takes two.
std::byte* acquire_stack(size_t stack_bytes);
void release_stack(std::byte* stack, size_t stack_bytes) noexcept;

}  // namespace crossdock::cpu
