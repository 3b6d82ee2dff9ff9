// SPDX-License-Identifier: Apache-2.0
// The library's kernels, listed by the code that launches them, so that all can be loaded ahead of their first launch.
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "runtime/runtime.h"

namespace crossdock {

// CUDA loads a kernel at its first launch (CUDA_MODULE_LOADING=LAZY, the default since CUDA 12.2). Loading waits for
// running kernels and blocks other threads in the driver. A running operation may wait for exactly this launch, or for
// a copy of the network's thread: a deadlock until the timeout.
class ListedKernel {
  public:
    // For static objects, created while the library is loaded.
    explicit ListedKernel(const void* function) noexcept;

    // Loads the kernel on the current device and allows its blocks all of the device's shared memory.
    cudaError_t prepare(cudaFuncAttributes& attributes) const noexcept;

    const void* function() const { return function_; }

  private:
    const void* function_;
};

// All kernels that this library can launch.
const std::vector<ListedKernel*>& listed_kernels();

// What the code of all kernels needs, which a device got of those in the library.
struct LoadedKernels {
    bool wait_for_previous = true;   // by themselves, so that they may start before the previous kernel has ended
    size_t static_shared_bytes = 0;  // of a block, the most
};

// Loads all of them on the device unless they are loaded. Throws ncclInvalidUsage if the library has no code for it,
// or ncclUnhandledCudaError.
LoadedKernels load_kernels(int device);

// Throws ncclUnhandledCudaError.
[[noreturn]] void fail_launch(const char* kernel, const LaunchShape& shape, cudaError_t reason);

}  // namespace crossdock
