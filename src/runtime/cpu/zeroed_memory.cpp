// SPDX-License-Identifier: Apache-2.0
#include "runtime/cpu/zeroed_memory.h"

#include <cstdint>
#include <cstdlib>
#include <new>

#include "runtime/cpu/sanitizer.h"

namespace crossdock::cpu {

ZeroedMemory::ZeroedMemory(size_t bytes, size_t alignment) : bytes_(bytes) {
    if (bytes > SIZE_MAX - alignment) throw std::bad_alloc();
    // calloc knows which pages the system has just zeroed; aligned_alloc would leave the zeroing, and so the touching,
    // to us.
    allocated_bytes_ = bytes + alignment;
    allocated_ = std::calloc(1, allocated_bytes_);
    if (allocated_ == nullptr) throw std::bad_alloc();
    auto* allocated = static_cast<std::byte*>(allocated_);
    data_ = allocated + (alignment - reinterpret_cast<uintptr_t>(allocated) % alignment) % alignment;
    // The address sanitizer sees an access before or behind the caller's part, although it lies inside the allocation.
    sanitizer::poison(allocated, static_cast<size_t>(data_ - allocated));
    sanitizer::poison(data_ + bytes, static_cast<size_t>(allocated + allocated_bytes_ - (data_ + bytes)));
}

ZeroedMemory::~ZeroedMemory() {
    if (allocated_ == nullptr) return;
    sanitizer::unpoison(allocated_, allocated_bytes_);
    std::free(allocated_);
}

}  // namespace crossdock::cpu
