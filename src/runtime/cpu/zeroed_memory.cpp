// SPDX-License-Identifier: Apache-2.0
#include "runtime/cpu/zeroed_memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>

#include "runtime/cpu/sanitizer.h"

namespace crossdock::cpu {
namespace {

constexpr size_t kPageBytes = 64 << 10;  // a multiple of every system's
constexpr size_t kFewestHugeBytes = size_t{4} << 20;

}  // namespace

ZeroedMemory::ZeroedMemory(size_t bytes, size_t alignment) : bytes_(bytes) {
    if (bytes > SIZE_MAX - alignment) throw std::bad_alloc();
    // calloc knows which pages the kernel has zeroed; with aligned_alloc we would have to zero, and so touch, all.
    allocated_bytes_ = bytes + alignment;
    allocated_ = std::calloc(1, allocated_bytes_);
    if (allocated_ == nullptr) throw std::bad_alloc();
    auto* allocated = static_cast<std::byte*>(allocated_);
    if (bytes >= kFewestHugeBytes) {
        // Rows are scattered over many megabytes; with small pages every row needs a page table walk. A failure costs
        // only speed.
        const auto first = (reinterpret_cast<uintptr_t>(allocated) + kPageBytes - 1) / kPageBytes * kPageBytes;
        const auto end = (reinterpret_cast<uintptr_t>(allocated) + allocated_bytes_) / kPageBytes * kPageBytes;
        (void)madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
    }
    data_ = allocated + (alignment - reinterpret_cast<uintptr_t>(allocated) % alignment) % alignment;
    // Lets AddressSanitizer detect accesses before and after the caller's part of the allocation.
    sanitizer::poison(allocated, static_cast<size_t>(data_ - allocated));
    sanitizer::poison(data_ + bytes, static_cast<size_t>(allocated + allocated_bytes_ - (data_ + bytes)));
}

ZeroedMemory::~ZeroedMemory() {
    if (allocated_ == nullptr) return;
    sanitizer::unpoison(allocated_, allocated_bytes_);
    std::free(allocated_);
}

}  // namespace crossdock::cpu
