// SPDX-License-Identifier: Apache-2.0
// One rank's GPU: its memory, copies and properties.
#pragma once

#include <memory>
#include <vector>

#include "runtime/cuda/retired_memory.h"
#include "runtime/runtime.h"

namespace crossdock {

// Every call makes the device current and restores the caller's; failures of CUDA throw ncclUnhandledCudaError. Not
// thread safe.
class CudaRuntime final : public Runtime {
  public:
    // Loads all kernels, and CUDA's own for copies, so that nothing is loaded while an operation runs.
    explicit CudaRuntime(int device);
    ~CudaRuntime() override;
    CudaRuntime(const CudaRuntime&) = delete;
    CudaRuntime& operator=(const CudaRuntime&) = delete;

    std::unique_ptr<StreamOrder> make_stream_order() override;
    int enter_device() override;
    void leave_device(int previous) noexcept override;
    void beside_captures(const std::function<void()>& code) override;

    // free() retires memory (retired_memory.h): it rarely waits, and queued operations may still use the memory.
    void* allocate(size_t bytes) override;
    void free(void* memory) noexcept override;
    void* allocate_host_visible(size_t bytes) override;
    void free_host_visible(void* memory) noexcept override { free(memory); }

    // copy_to_device throws ncclInvalidUsage on a capturing stream: a graph would read the source long after the call.
    void copy_to_device(void* target, const void* host_source, size_t bytes, cudaStream_t stream) override;
    void copy_on_device(void* target, const void* source, size_t bytes, cudaStream_t stream) override;
    void copy_to_host(void* host_target, const void* source, size_t bytes, cudaStream_t stream) override;
    void look_at_words(uint64_t* host_target, const uint64_t* source, size_t count) override;
    void synchronize(cudaStream_t stream) override;
    void synchronize_device() noexcept override;
    bool is_capturing(cudaStream_t stream) override;

    int num_sms() const override { return num_sms_; }
    size_t max_shared_bytes() const override { return max_shared_bytes_; }
    int compute_capability() const override { return compute_capability_; }
    bool overlaps_kernels() const override { return overlaps_kernels_; }

    int device() const { return device_; }

    // Throws ncclSystemError if the GPU has fewer bytes free, including retired ones.
    void expect_room(size_t bytes) const;

    // The library's internal stream, which the default stream does not block.
    cudaStream_t internal_stream() const { return stream_; }

  private:
    int device_;
    int num_sms_ = 0;
    size_t max_shared_bytes_ = 0;
    int compute_capability_ = 0;
    bool overlaps_kernels_ = false;
    cudaStream_t stream_ = nullptr;
    std::vector<RetiredBlock> blocks_;  // not yet retired
};

}  // namespace crossdock
