// SPDX-License-Identifier: Apache-2.0
#include "core/memory.h"

#include <utility>
#include <vector>

#include "core/error.h"
#include "core/log.h"

namespace crossdock {

DeviceMemory::DeviceMemory(Runtime& runtime, const ncclEpAllocConfig_t& hooks, size_t bytes, bool zeroed)
    : runtime_(&runtime), hooks_(hooks), bytes_(bytes) {
    if (hooks.alloc_fn == nullptr) {
        data_ = runtime.allocate(bytes);
        return;
    }
    cudaError_t result = cudaSuccess;
    runtime.beside_captures([&] { result = hooks.alloc_fn(&data_, bytes, hooks.context); });
    require(result == cudaSuccess && data_ != nullptr, ncclUnhandledCudaError,
            "config->alloc.alloc_fn failed to give {} bytes: error {}", bytes, static_cast<int>(result));
    if (!zeroed) return;
    try {
        const std::vector<std::byte> zeros(bytes);
        runtime.copy_to_device(data_, zeros.data(), bytes, nullptr);
        runtime.synchronize(nullptr);
    } catch (...) {
        release();
        throw;
    }
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
    std::swap(runtime_, other.runtime_);
    std::swap(hooks_, other.hooks_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
}

void DeviceMemory::release() noexcept {
    void* data = std::exchange(data_, nullptr);
    bytes_ = 0;
    if (data == nullptr) return;
    if (hooks_.free_fn == nullptr) return runtime_->free(data);
    cudaError_t result = cudaSuccess;
    runtime_->beside_captures([&] { result = hooks_.free_fn(data, hooks_.context); });
    if (result != cudaSuccess) debug("config->alloc.free_fn failed");
}

}  // namespace crossdock
