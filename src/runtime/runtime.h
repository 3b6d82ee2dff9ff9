// SPDX-License-Identifier: Apache-2.0
// Where a rank's kernels run and its local memory lives: a GPU's stream, or the CPU executor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "device/platform.h"
#include "nccl_ep.h"

namespace crossdock {

namespace cpu {
class Executor;
}

// A kernel launch: blocks x warps, and the bytes of shared memory of each block.
struct LaunchShape {
    int num_blocks = 1;
    int warps_per_block = 1;
    size_t shared_bytes = 0;
    bool overlaps_previous = false;  // GPUs: may take its place on the device before the kernel before it has ended
    bool streams_rows = false;       // CPUs: asynchronous copies write past the caches
    int unused_blocks = 0;           // GPUs: come before the others and end at once
    bool is_users = false;           // CPUs: the kernel of a user's program, whose races gin/race_detector.h finds
};

// Keeps a group's operations in the order of their issue when the caller changes streams between them: kernels of one
// group never run at once, so two ranks can not start two of them in different orders and wait for each other forever.
// Around a launch, in this order and with the rank's device current: before_operation, the launch, after_operation.
// True: the stream is capturing, so the operation becomes part of a graph.
class StreamOrder {
  public:
    virtual ~StreamOrder() = default;
    virtual bool before_operation(cudaStream_t stream) = 0;
    virtual void after_operation(cudaStream_t stream) = 0;
    virtual bool is_idle() noexcept = 0;  // everything issued so far is known to have finished
    virtual void synchronize() = 0;       // waits until it has
};

extern const bool kIsBuiltForGpus;  // whether this library has the code for them

class Runtime {
  public:
    virtual ~Runtime() = default;

    // Null where operations finish before their call returns.
    virtual std::unique_ptr<StreamOrder> make_stream_order() { return nullptr; }

    // Makes the rank's device current for the calling thread and restores the previous one with the value that enter
    // returned.
    virtual int enter_device() { return 0; }
    virtual void leave_device(int) noexcept {}

    // Code of the caller's that may allocate and free: it belongs into no graph, and breaks none that some thread
    // captures meanwhile.
    virtual void beside_captures(const std::function<void()>& code) { code(); }

    // Local device memory, zeroed. Error with ncclSystemError/ncclUnhandledCudaError when there is none left.
    virtual void* allocate(size_t bytes) = 0;
    virtual void free(void* memory) noexcept = 0;

    // Zeroed memory that kernels write and the host reads while they run.
    virtual void* allocate_host_visible(size_t bytes) = 0;
    virtual void free_host_visible(void* memory) noexcept = 0;

    // In stream order. The host source may be reused on return.
    virtual void copy_to_device(void* target, const void* host_source, size_t bytes, cudaStream_t stream) = 0;
    virtual void copy_on_device(void* target, const void* source, size_t bytes, cudaStream_t stream) = 0;
    virtual void copy_to_host(void* host_target, const void* source, size_t bytes, cudaStream_t stream) = 0;  // blocks
    virtual void synchronize(cudaStream_t stream) = 0;
    virtual void synchronize_device() noexcept = 0;
    virtual bool is_capturing(cudaStream_t stream) = 0;

    // Blocks that can wait for each other: all are resident at once. The number of them, for a block of that shape.
    virtual int num_sms() const = 0;
    virtual size_t max_shared_bytes() const = 0;  // of one block
    virtual int compute_capability() const = 0;   // 10 * major + minor; 0: a CPU

    virtual cpu::Executor* cpu_executor() { return nullptr; }  // null: a GPU
};

class DeviceScope {
  public:
    explicit DeviceScope(Runtime& runtime) : runtime_(runtime), previous_(runtime.enter_device()) {}
    ~DeviceScope() { runtime_.leave_device(previous_); }
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;

  private:
    Runtime& runtime_;
    int previous_;
};

}  // namespace crossdock
