// SPDX-License-Identifier: Apache-2.0
#include "runtime/cuda/cuda_runtime.h"

#include <algorithm>
#include <cstring>

#include "runtime/cuda/cuda_check.h"

namespace crossdock {
namespace {

// Freed memory that may wait for the device; handles' memory is far smaller.
constexpr size_t kMaxRetiredBytes = size_t{64} << 20;

int attribute(cudaDeviceAttr which, int device) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
    return value;
}

}  // namespace

CudaRuntime::CudaRuntime(int device) : device_(device) {
    DeviceGuard guard(device_);
    num_sms_ = attribute(cudaDevAttrMultiProcessorCount, device_);
    max_shared_bytes_ = static_cast<size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device_));
    compute_capability_ = 10 * attribute(cudaDevAttrComputeCapabilityMajor, device_) +
                          attribute(cudaDevAttrComputeCapabilityMinor, device_);
    // Streams of one priority may share a hardware queue, where our copies would stand behind a kernel that waits for
    // them.
    int least_priority = 0, greatest_priority = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least_priority, &greatest_priority),
               "cudaDeviceGetStreamPriorityRange");
    check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest_priority),
               "cudaStreamCreateWithPriority");
}

CudaRuntime::~CudaRuntime() {
    try {
        DeviceGuard guard(device_);
        for (const Block& block : blocks_) (void)cudaFree(block.memory);
        (void)cudaStreamDestroy(stream_);
    } catch (const Error&) {
        // The device is gone, and the memory with it.
    }
}

void* CudaRuntime::allocate(size_t bytes) {
    DeviceGuard guard(device_);
    bytes = std::max<size_t>(bytes, 1);
    blocks_.reserve(blocks_.size() + 1);  // so that nothing is lost between here and there
    void* memory = nullptr;
    cudaError_t result = cudaMalloc(&memory, bytes);
    if (result == cudaErrorMemoryAllocation && retired_bytes_ > 0) {
        release_retired();
        result = cudaMalloc(&memory, bytes);
    }
    if (result == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        fail(ncclUnhandledCudaError, "GPU {} has no {} bytes of memory left (cudaMalloc)", device_, bytes);
    }
    check_cuda(result, "cudaMalloc");
    blocks_.push_back({memory, bytes, false});
    check_cuda(cudaMemsetAsync(memory, 0, bytes, stream_), "cudaMemsetAsync");
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    return memory;
}

void CudaRuntime::free(void* memory) noexcept {
    for (Block& block : blocks_) {
        if (block.memory != memory || block.retired) continue;
        block.retired = true;
        retired_bytes_ += block.bytes;
    }
    if (retired_bytes_ > kMaxRetiredBytes) release_retired();
}

void CudaRuntime::release_retired() noexcept {
    try {
        DeviceGuard guard(device_);
        std::erase_if(blocks_, [](const Block& block) {
            if (block.retired) (void)cudaFree(block.memory);
            return block.retired;
        });
        retired_bytes_ = 0;
    } catch (const Error&) {
        // The device is gone. The destructor tries once more.
    }
}

void* CudaRuntime::allocate_host_visible(size_t bytes) {
    DeviceGuard guard(device_);
    void* memory = nullptr;
    bytes = std::max<size_t>(bytes, 1);
    check_cuda(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    std::memset(memory, 0, bytes);
    return memory;
}

void CudaRuntime::free_host_visible(void* memory) noexcept {
    if (memory != nullptr) (void)cudaFreeHost(memory);
}

void CudaRuntime::copy_to_device(void* target, const void* host_source, size_t bytes, cudaStream_t stream) {
    if (bytes == 0) return;
    require(!is_capturing(stream), ncclInvalidUsage,
            "the stream is capturing a graph: this call reads host memory once, now");
    DeviceGuard guard(device_);
    // CUDA stages pageable memory before the call returns. Pinned or managed memory it would read later, so that goes
    // through pageable memory first.
    cudaPointerAttributes attributes = {};
    check_cuda(cudaPointerGetAttributes(&attributes, host_source), "cudaPointerGetAttributes");
    std::vector<std::byte> pageable;
    if (attributes.type != cudaMemoryTypeUnregistered) {
        const auto* first = static_cast<const std::byte*>(host_source);
        pageable.assign(first, first + bytes);
        host_source = pageable.data();
    }
    check_cuda(cudaMemcpyAsync(target, host_source, bytes, cudaMemcpyHostToDevice, stream),
               "cudaMemcpyAsync to the device");
}

void CudaRuntime::copy_on_device(void* target, const void* source, size_t bytes, cudaStream_t stream) {
    if (bytes == 0) return;
    DeviceGuard guard(device_);
    check_cuda(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToDevice, stream),
               "cudaMemcpyAsync on the device");
}

void CudaRuntime::copy_to_host(void* host_target, const void* source, size_t bytes, cudaStream_t stream) {
    if (bytes == 0) return;
    DeviceGuard guard(device_);
    check_cuda(cudaMemcpyAsync(host_target, source, bytes, cudaMemcpyDeviceToHost, stream),
               "cudaMemcpyAsync to the host");
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

void CudaRuntime::synchronize(cudaStream_t stream) {
    DeviceGuard guard(device_);
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

void CudaRuntime::synchronize_device() noexcept {
    try {
        DeviceGuard guard(device_);
        if (cudaDeviceSynchronize() != cudaSuccess) (void)cudaGetLastError();
    } catch (const Error&) {
        // The device is gone: nothing runs there.
    }
}

bool CudaRuntime::is_capturing(cudaStream_t stream) {
    DeviceGuard guard(device_);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
}

}  // namespace crossdock
