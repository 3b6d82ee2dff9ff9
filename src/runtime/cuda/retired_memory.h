// SPDX-License-Identifier: Apache-2.0
// Memory on its way back to CUDA.
#pragma once

#include <cstddef>

namespace crossdock {

struct RetiredBlock {
    void* memory = nullptr;
    size_t bytes = 0;
    int device = 0;
    bool is_host = false;  // from cudaHostAlloc
};

// cudaFree and cudaFreeHost wait for everything that runs on the device. Where ranks share a GPU that can be a peer's
// kernel that waits for this very thread, so blocks are kept, for the whole process, until many bytes have come
// together. Until then nothing waits, and work already queued may go on using the memory. Any thread.
void retire(const RetiredBlock& block) noexcept;

// Gives all of it back to CUDA: waits for the devices concerned.
void free_retired() noexcept;

}  // namespace crossdock
