// SPDX-License-Identifier: Apache-2.0
#include "runtime/cuda/cuda_runtime.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/error.h"
#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/kernel_list.h"
#include "runtime/cuda/stream_order.h"
#include "runtime/gpu_support.h"

namespace crossdock {

const bool kIsBuiltForGpus = true;

namespace {

int attribute(cudaDeviceAttr which, int device) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
    return value;
}

// CUDA also initializes its copies and fills at their first use, which may wait as loading a kernel does.
void warm_up_copies(CudaRuntime& runtime) {
    static std::atomic<uint64_t> done{0};  // bit: device
    const uint64_t bit = uint64_t{1} << (runtime.device() % 64);
    if ((done.load(std::memory_order_acquire) & bit) != 0) return;
    const cudaStream_t stream = runtime.internal_stream();
    for (const size_t bytes : {size_t{8}, size_t{64} << 10}) {
        std::vector<std::byte> host(bytes);
        auto* memory = static_cast<std::byte*>(runtime.allocate(2 * bytes));  // fills
        runtime.copy_to_device(memory, host.data(), bytes, stream);
        runtime.copy_on_device(memory + bytes, memory, bytes, stream);
        runtime.copy_to_host(host.data(), memory, bytes, stream);
        runtime.free(memory);
    }
    done.fetch_or(bit, std::memory_order_release);
}

}  // namespace

void fail_cuda(cudaError_t result, const char* call) {
    // Clears the thread's last error, which a later caller would otherwise get.
    (void)cudaGetLastError();
    fail(ncclUnhandledCudaError, "{} failed: {} ({})", call, cudaGetErrorString(result), cudaGetErrorName(result));
}

CudaRuntime::CudaRuntime(int device) : device_(device) {
    int driver = 0;
    check_cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    expect_driver(driver, CUDART_VERSION);
    DeviceGuard guard(device_);
    compute_capability_ = 10 * attribute(cudaDevAttrComputeCapabilityMajor, device_) +
                          attribute(cudaDevAttrComputeCapabilityMinor, device_);
    if (compute_capability_ < kLeastComputeCapability) {
        cudaDeviceProp properties = {};
        check_cuda(cudaGetDeviceProperties(&properties, device_), "cudaGetDeviceProperties");
        expect_new_enough({device_, &properties.name[0], compute_capability_});
    }
    const LoadedKernels kernels = load_kernels(device_);
    overlaps_kernels_ = kernels.wait_for_previous;
    num_sms_ = attribute(cudaDevAttrMultiProcessorCount, device_);
    max_shared_bytes_ =
        static_cast<size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device_)) - kernels.static_shared_bytes;
    // Streams of one priority may share a hardware queue, where our copies could be queued behind a kernel that waits
    // for them.
    int least_priority = 0, greatest_priority = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least_priority, &greatest_priority),
               "cudaDeviceGetStreamPriorityRange");
    check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest_priority),
               "cudaStreamCreateWithPriority");
    try {
        warm_up_copies(*this);
    } catch (...) {
        (void)cudaStreamDestroy(stream_);
        throw;
    }
}

CudaRuntime::~CudaRuntime() {
    for (const RetiredBlock& block : blocks_) retire(block);
    (void)cudaStreamDestroy(stream_);
}

std::unique_ptr<StreamOrder> CudaRuntime::make_stream_order() { return std::make_unique<CudaStreamOrder>(device_); }

int CudaRuntime::enter_device() {
    int previous = 0;
    check_cuda(cudaGetDevice(&previous), "cudaGetDevice");
    if (previous != device_) check_cuda(cudaSetDevice(device_), "cudaSetDevice");
    return previous;
}

void CudaRuntime::leave_device(int previous) noexcept {
    if (previous != device_) (void)cudaSetDevice(previous);
}

void CudaRuntime::beside_captures(const std::function<void()>& code) {
    const RelaxedCapture relaxed;
    code();
}

void* CudaRuntime::allocate(size_t bytes) {
    DeviceGuard guard(device_);
    blocks_.reserve(blocks_.size() + 1);  // so that push_back cannot throw and leak
    RetiredBlock block{nullptr, std::max<size_t>(bytes, 1), device_, false};
    cudaError_t result = cudaMalloc(&block.memory, block.bytes);
    if (result == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        free_retired();
        result = cudaMalloc(&block.memory, block.bytes);
    }
    if (result == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        fail(ncclUnhandledCudaError, "GPU {} has no {} bytes of memory left (cudaMalloc)", device_, bytes);
    }
    check_cuda(result, "cudaMalloc");
    blocks_.push_back(block);
    check_cuda(cudaMemsetAsync(block.memory, 0, block.bytes, stream_), "cudaMemsetAsync");
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    return block.memory;
}

void CudaRuntime::expect_room(size_t bytes) const {
    DeviceGuard guard(device_);
    size_t free_bytes = 0;
    size_t all_bytes = 0;
    check_cuda(cudaMemGetInfo(&free_bytes, &all_bytes), "cudaMemGetInfo");
    if (bytes > free_bytes) {
        free_retired();
        check_cuda(cudaMemGetInfo(&free_bytes, &all_bytes), "cudaMemGetInfo");
    }
    require(bytes <= free_bytes, ncclSystemError,
            "GPU {} has {} bytes free of {}: lower max_dispatch_tokens_per_rank or max_token_bytes", device_,
            free_bytes, all_bytes);
}

void* CudaRuntime::allocate_host_visible(size_t bytes) {
    DeviceGuard guard(device_);
    blocks_.reserve(blocks_.size() + 1);
    RetiredBlock block{nullptr, std::max<size_t>(bytes, 1), device_, true};
    check_cuda(cudaHostAlloc(&block.memory, block.bytes, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    blocks_.push_back(block);
    std::memset(block.memory, 0, block.bytes);
    return block.memory;
}

void CudaRuntime::free(void* memory) noexcept {
    const auto is_it = [memory](const RetiredBlock& block) { return block.memory == memory; };
    const auto block = std::find_if(blocks_.begin(), blocks_.end(), is_it);
    if (block == blocks_.end()) return;
    retire(*block);
    blocks_.erase(block);
}

void CudaRuntime::copy_to_device(void* target, const void* host_source, size_t bytes, cudaStream_t stream) {
    if (bytes == 0) return;
    require(!is_capturing(stream), ncclInvalidUsage,
            "the stream is capturing a graph: this call reads host memory once, now");
    DeviceGuard guard(device_);
    // CUDA stages pageable memory before the call returns, but reads pinned and managed memory later, so such a source
    // is copied to pageable memory first.
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
    // Synchronize first: a copy to pageable memory that waits for a kernel blocks all other threads in the driver.
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    check_cuda(cudaMemcpyAsync(host_target, source, bytes, cudaMemcpyDeviceToHost, stream),
               "cudaMemcpyAsync to the host");
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

void CudaRuntime::look_at_words(uint64_t* host_target, const uint64_t* source, size_t count) {
    DeviceGuard guard(device_);
    const RelaxedCapture relaxed;
    check_cuda(cudaMemcpyAsync(host_target, source, sizeof(uint64_t) * count, cudaMemcpyDeviceToHost, stream_),
               "cudaMemcpyAsync to the host");
    check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
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
        // The device has failed, so nothing runs there.
    }
}

bool CudaRuntime::is_capturing(cudaStream_t stream) {
    DeviceGuard guard(device_);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
}

}  // namespace crossdock
