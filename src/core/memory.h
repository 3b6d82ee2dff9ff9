// SPDX-License-Identifier: Apache-2.0
// Device memory of a group that no peer accesses: from the caller's hooks if given, else from the runtime.
#pragma once

#include <cstddef>

#include "nccl_ep.h"
#include "runtime/runtime.h"

namespace crossdock {

class DeviceMemory {
  public:
    DeviceMemory() = default;
    // Zeroed. UnhandledCudaError with the hook's own code if it fails.
    DeviceMemory(Runtime& runtime, const ncclEpAllocConfig_t& hooks, size_t bytes, bool zeroed = true);
    DeviceMemory(DeviceMemory&& other) noexcept;
    DeviceMemory& operator=(DeviceMemory&& other) noexcept;
    ~DeviceMemory() { release(); }

    void release() noexcept;
    std::byte* data() const { return static_cast<std::byte*>(data_); }
    size_t bytes() const { return bytes_; }

  private:
    Runtime* runtime_ = nullptr;
    ncclEpAllocConfig_t hooks_{};
    void* data_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace crossdock
