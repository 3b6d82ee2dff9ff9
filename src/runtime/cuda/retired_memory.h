// SPDX-License-Identifier: Apache-2.0
// Memory that waits to be returned to CUDA.
#pragma once

#include <cstddef>

namespace crossdock {

struct RetiredBlock {
    void* memory = nullptr;
    size_t bytes = 0;
    int device = 0;
    bool is_host = false;  // from cudaHostAlloc
};

// cudaFree and cudaFreeHost wait for all running kernels of the device. If ranks share a GPU, that may be a peer's
// kernel that waits for this thread. So blocks are kept, per process, until many bytes are retired; until then nothing
// waits, and queued operations may still use the memory. Thread safe.
void retire(const RetiredBlock& block) noexcept;

// Frees all retired blocks. Waits for their devices.
void free_retired() noexcept;

}  // namespace crossdock
