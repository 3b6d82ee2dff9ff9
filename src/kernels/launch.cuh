// SPDX-License-Identifier: Apache-2.0
// How a kernel is put on a stream.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "device/platform.h"
#include "kernels/launch.h"

namespace crossdock::cuda {

// Once a kernel and device: a block may use all shared memory that the device gives.
template <auto kKernel>
cudaError_t allow_all_shared_memory() {
    static std::atomic<uint64_t> done{0};  // bit: device
    int device = 0;
    const cudaError_t known = cudaGetDevice(&device);
    const uint64_t bit = uint64_t{1} << (device % 64);
    if (known != cudaSuccess || (done.load(std::memory_order_acquire) & bit) != 0) return known;
    int bytes = 0;
    cudaError_t result = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (result == cudaSuccess) {
        result = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    }
    if (result == cudaSuccess && device < 64) done.fetch_or(bit, std::memory_order_release);
    return result;
}

template <auto kKernel, typename Args>
void launch(const Args& args, const LaunchShape& shape, cudaStream_t stream, const char* name) {
    cudaError_t result = allow_all_shared_memory<kKernel>();
    if (result == cudaSuccess) {
        cudaLaunchAttribute overlap{};
        overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        overlap.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config{};
        config.attrs = &overlap;
        config.numAttrs = shape.overlaps_previous ? 1 : 0;
        config.gridDim = dim3(static_cast<unsigned>(shape.unused_blocks + shape.num_blocks));
        config.blockDim = dim3(static_cast<unsigned>(shape.warps_per_block * kLanes));
        config.dynamicSmemBytes = shape.shared_bytes;
        config.stream = stream;
        result = cudaLaunchKernelEx(&config, kKernel, args);
    }
    if (result != cudaSuccess) {
        const cudaError_t cleared = cudaGetLastError();
        static_cast<void>(cleared);
        fail_launch(name, shape, cudaGetErrorString(result));
    }
}

}  // namespace crossdock::cuda
