// SPDX-License-Identifier: Apache-2.0
// Owned, zeroed, aligned memory of this process.
#pragma once

#include <cstddef>
#include <utility>

#include "device/platform.h"

namespace crossdock::cpu {

inline constexpr size_t kSharedAlignment = 128;

class ZeroedMemory {
  public:
    ZeroedMemory() = default;
    // Pages of large sizes are allocated when touched. alignment: a power of two. Throws std::bad_alloc if there is no
    // memory.
    ZeroedMemory(size_t bytes, size_t alignment);
    ~ZeroedMemory();
    ZeroedMemory(ZeroedMemory&& other) noexcept { swap(other); }
    ZeroedMemory& operator=(ZeroedMemory&& other) noexcept {
        swap(other);
        return *this;
    }

    std::byte* data() const { return data_; }
    size_t bytes() const { return bytes_; }

  private:
    void swap(ZeroedMemory& other) noexcept {
        std::swap(allocated_, other.allocated_);
        std::swap(allocated_bytes_, other.allocated_bytes_);
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
    }

    void* allocated_ = nullptr;
    size_t allocated_bytes_ = 0;
    std::byte* data_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace crossdock::cpu
