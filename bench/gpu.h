// SPDX-License-Identifier: Apache-2.0
// What the benchmark needs of GPUs: windows, events, graphs, and the lower bound. In a build without CUDA every
// function throws.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/options.h"
#include "nccl_ep.h"
#include "tools/common/device.h"

namespace crossdock::bench {

struct GpuWindow {
    void* memory = nullptr;
    ncclWindow_t window = nullptr;
};

// Collective. The window is null where NCCL has no symmetric memory; expect_gpu_window then throws.
GpuWindow make_gpu_window(ncclComm_t comm, size_t bytes);
GpuWindow expect_gpu_window(ncclComm_t comm, size_t bytes);
void free_gpu_window(ncclComm_t comm, const GpuWindow& window);

// Times on the device's stream.
class GpuStopwatch {
  public:
    virtual ~GpuStopwatch() = default;

    // From just before `enqueue`'s work to its end, us; waits for it.
    virtual double time_once(const std::function<void()>& enqueue) = 0;

    // What `enqueue` takes on the CPU, us, when nothing is under way on the stream.
    virtual double time_call(const std::function<void()>& enqueue) = 0;

    // Makes a graph of the work of `enqueue`, under this number. Other ranks should not be waiting for this one
    // meanwhile: it allocates.
    virtual void make_graph(size_t number, const std::function<void()>& enqueue) = 0;

    // The graph launched num_replays times in a row: us per replay. Nothing of a launch shows, since one goes before
    // them.
    virtual double time_replays(size_t number, int num_replays) = 0;

    virtual void forget_graphs() = 0;
};

std::unique_ptr<GpuStopwatch> make_gpu_stopwatch(tools::Device& device);

// The lower bound: this rank's bytes for every peer of its LSA team, written as bulk copies of shared memory, all
// ranks at once.
class GpuLowerBound {
  public:
    virtual ~GpuLowerBound() = default;

    virtual int lsa_team_size() const = 0;

    // Enqueues `count` rounds as one kernel; bytes_to [ranks], of which the own entry and other teams' are not written.
    virtual void enqueue(const std::vector<uint64_t>& bytes_to, int count) = 0;
};

// Collective; room for max_bytes from every peer.
std::unique_ptr<GpuLowerBound> make_gpu_lower_bound(const tools::RankContext& context, ncclComm_t comm,
                                                    tools::Device& device, uint64_t max_bytes);

// What a single rank's low-latency operations have to do at least: launches, and rows, counts and flags through memory.
class BareLl {
  public:
    virtual ~BareLl() = default;

    // Enqueues `count` operations, a kernel each (a pair: two), and a small one behind them.
    virtual void enqueue(Operation operation, int num_tokens, int count) = 0;
};

struct BareShape {
    int max_tokens;
    int topk;
    int num_experts;
    int copies;  // rows that are delivered per token
    uint32_t row_bytes;
    std::vector<int32_t> topk_idx;  // [max_tokens][topk]
};
std::unique_ptr<BareLl> make_bare_ll(tools::Device& device, const BareShape& shape);

// Of the current GPU, by all processes; bytes.
size_t used_gpu_memory();

// "NVIDIA H200, driver ..., NCCL 2.30.7".
std::string describe_gpu();

}  // namespace crossdock::bench
