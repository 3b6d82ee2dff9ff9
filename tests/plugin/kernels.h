// SPDX-License-Identifier: Apache-2.0
// Kernels that put, signal, get and flush, and what they report.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>
#include <nccl_device.h>

#include <cstdint>

namespace crossdock::plugin_test {

// A rank's window: what it sends to each rank, what it received from each, what it got from each, a word each.
struct Layout {
    uint64_t slot_bytes;
    uint64_t num_ranks;
    __host__ __device__ uint64_t sent(uint64_t rank) const { return rank * slot_bytes; }
    __host__ __device__ uint64_t received(uint64_t rank) const { return (num_ranks + rank) * slot_bytes; }
    __host__ __device__ uint64_t got(uint64_t rank) const { return (2 * num_ranks + rank) * slot_bytes; }
    __host__ __device__ uint64_t word(uint64_t rank) const { return 3 * num_ranks * slot_bytes + rank * 8; }
    __host__ __device__ uint64_t bytes() const { return word(num_ranks); }
};

enum class Step : uint32_t {
    kNone,
    kWeakSignal,
    kCounter,
    kStrongSignal,
    kValue,
    kVirtualSignal,
    kGet,
    kFlush,
    kAcknowledged,
};

// The first thing that went wrong.
struct Failure {
    Step step;
    uint32_t is_timeout;  // a wait, else wrong bytes
    uint32_t peer;
    uint32_t round;
    uint64_t place;
    uint64_t expected;
    uint64_t seen;
};

struct Job {
    ncclDevComm comm;
    ncclWindow_t window;
    std::byte* local;  // the window's memory here
    Layout layout;
    uint64_t bytes;  // of a put, a multiple of 8
    uint32_t rounds;
    uint32_t first_round;  // rounds are counted over all launches
    // From the peer, of the kind that a measurement waits for: it may begin before this rank's kernel does.
    uint64_t signals_before;
    Failure* failure;
    uint64_t* times;  // of one measurement
};

inline constexpr int kSignalKinds = 4;  // weak, strong, value, acknowledged: one each for every source
inline constexpr int kNumCounters = 1;

// On the current device. Call it before any of them runs: loading one may wait for running kernels, which wait for
// ranks that have not launched theirs.
cudaError_t load_kernels();

void launch_orders(const Job& job, cudaStream_t stream);
// Between ranks 0 and 1; others do nothing. Nanoseconds of all rounds in times[0], at rank 0.
void launch_ping_pong(const Job& job, cudaStream_t stream);
void launch_stream(const Job& job, cudaStream_t stream);

}  // namespace crossdock::plugin_test
