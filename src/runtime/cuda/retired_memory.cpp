// SPDX-License-Identifier: Apache-2.0
#include "runtime/cuda/retired_memory.h"

#include <mutex>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/log.h"
#include "runtime/cuda/cuda_check.h"

namespace crossdock {
namespace {

constexpr size_t kMaxRetiredBytes = size_t{64} << 20;

struct Retired {
    std::mutex mutex;
    std::vector<RetiredBlock> blocks;
    size_t bytes = 0;
};

Retired& retired() {
    // Never destroyed: groups may outlive static objects, and CUDA cannot be called then.
    static Retired& instance = *new Retired;
    return instance;
}

}  // namespace

void retire(const RetiredBlock& block) noexcept {
    try {
        std::lock_guard lock(retired().mutex);
        retired().blocks.push_back(block);
        retired().bytes += block.bytes;
        if (retired().bytes <= kMaxRetiredBytes) return;
    } catch (const std::exception& error) {
        debug(error.what());
    }
    free_retired();
}

void free_retired() noexcept {
    std::vector<RetiredBlock> blocks;
    {
        // Free without the lock: a thread that retires must not wait for the device.
        std::lock_guard lock(retired().mutex);
        blocks.swap(retired().blocks);
        retired().bytes = 0;
    }
    for (const RetiredBlock& block : blocks) {
        try {
            DeviceGuard guard(block.device);
            check_cuda(block.is_host ? cudaFreeHost(block.memory) : cudaFree(block.memory), "freeing memory");
        } catch (const Error& error) {
            debug(error.what());
        }
    }
}

}  // namespace crossdock
