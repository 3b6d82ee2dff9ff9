// SPDX-License-Identifier: Apache-2.0
// A rank of a CPU backend: device memory is ordinary memory, streams do not exist.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>

#include "rank_context.h"
#include "tools/common/backend.h"

namespace crossdock::testing {

// "127.0.0.1:PORT" with a port that is free now.
std::string free_address();

// Communicators of threads of one process: the first thread creates them for all.
class CommunicatorSets {
  public:
    explicit CommunicatorSets(int num_ranks) : num_ranks_(num_ranks) {}
    ~CommunicatorSets();
    // The communicator of `rank` in set number `index`.
    ncclComm_t get(size_t index, int rank);

  private:
    int num_ranks_;
    std::mutex mutex_;
    std::vector<std::vector<ncclComm_t>> sets_;
};

class CpuRank : public RankContext {
  public:
    // sets: where other communicators come from in the backends of one process; null for processes.
    CpuRank(Backend backend, ncclComm_t comm, int rank, int num_ranks, CommunicatorSets* sets)
        : RankContext(comm, rank, num_ranks), backend_(backend), sets_(sets) {}
    ~CpuRank() override;

    void* allocate(size_t bytes) override;
    void deallocate(void* memory) override;
    void copy_to_device(void* target, const void* source, size_t bytes, cudaStream_t stream) override;
    void copy_to_host(void* target, const void* source, size_t bytes, cudaStream_t stream) override;
    cudaStream_t make_stream() override { return nullptr; }
    void synchronize(cudaStream_t) override {}
    Window make_window(size_t bytes) override;
    void destroy_window(const Window& window) override;
    void barrier() override;
    void all_gather(const void* own, void* all, size_t bytes) override;
    ncclComm_t make_communicator() override;
    bool is_simulated() const override { return backend_ == Backend::kSimulation; }

  private:
    Backend backend_;
    CommunicatorSets* sets_;
    size_t num_made_ = 0;
    std::vector<ncclComm_t> joined_;
    std::map<void*, std::unique_ptr<std::byte[]>> allocations_;
};

}  // namespace crossdock::testing
