// SPDX-License-Identifier: Apache-2.0
// Runs a rank's kernels and owns its local memory: on a GPU's streams, or with the CPU executor.
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
    bool overlaps_previous = false;  // GPUs: may start before the previous kernel has ended
    bool streams_rows = false;       // CPUs: asynchronous copies bypass the caches
    int unused_blocks = 0;           // GPUs: leading blocks that return at once
    bool is_users = false;           // CPUs: a user's kernel, checked by device_api/race_detector.h
    size_t stack_bytes = 0;          // CPUs: of each warp; 0: enough for Crossdock's own kernels
};

// Keeps a group's operations in issue order when the caller changes streams between them. Kernels of one group never
// run concurrently, so two ranks cannot start two of them in different orders and deadlock. Call before_operation, the
// launch and after_operation in this order, with the rank's device current. before_operation returns true if the stream
// is capturing, so that the operation becomes part of a graph.
class StreamOrder {
  public:
    virtual ~StreamOrder() = default;
    virtual bool before_operation(cudaStream_t stream) = 0;
    // rest_follows: the operation was the first half of one, whose second half is another operation.
    virtual void after_operation(cudaStream_t stream, bool rest_follows = false) = 0;
    virtual bool is_idle() noexcept = 0;  // true if all issued operations have finished
    virtual void synchronize() = 0;       // waits until they have
};

extern const bool kIsBuiltForGpus;  // whether this build has GPU code

class Runtime {
  public:
    virtual ~Runtime() = default;

    // Null if operations finish before their call returns.
    virtual std::unique_ptr<StreamOrder> make_stream_order() { return nullptr; }

    // enter_device makes the rank's device current on the calling thread and returns the previous one, which
    // leave_device restores.
    virtual int enter_device() { return 0; }
    virtual void leave_device(int) noexcept {}

    // Wraps calls of the user's allocation hooks, so that they are not captured and do not invalidate another thread's
    // capture.
    virtual void beside_captures(const std::function<void()>& code) { code(); }

    // Local device memory, zeroed. Throws ncclSystemError or ncclUnhandledCudaError if there is not enough.
    virtual void* allocate(size_t bytes) = 0;
    virtual void free(void* memory) noexcept = 0;

    // Zeroed memory that kernels write and the host reads while they run.
    virtual void* allocate_host_visible(size_t bytes) = 0;
    virtual void free_host_visible(void* memory) noexcept = 0;

    // In stream order. The host source may be reused on return.
    virtual void copy_to_device(void* target, const void* host_source, size_t bytes, cudaStream_t stream) = 0;
    virtual void copy_on_device(void* target, const void* source, size_t bytes, cudaStream_t stream) = 0;
    virtual void copy_to_host(void* host_target, const void* source, size_t bytes, cudaStream_t stream) = 0;  // blocks
    // Reads 64-bit words that kernels and peers may be writing, without waiting for any stream.
    virtual void look_at_words(uint64_t* host_target, const uint64_t* source, size_t count) = 0;
    virtual void synchronize(cudaStream_t stream) = 0;
    virtual void synchronize_device() noexcept = 0;
    virtual bool is_capturing(cudaStream_t stream) = 0;

    // Number of blocks that can be resident at once, and so may wait for each other.
    virtual int num_sms() const = 0;
    virtual size_t max_shared_bytes() const = 0;  // of one block
    virtual int compute_capability() const = 0;   // 10 * major + minor; 0: a CPU
    // Whether a launch may let a kernel start before the previous one has ended (LaunchShape::overlaps_previous).
    virtual bool overlaps_kernels() const { return false; }

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
