// SPDX-License-Identifier: Apache-2.0
// A rank of a CPU backend: device memory is ordinary memory, streams do not exist.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "rank_context.h"

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
    // make_comm(rank, index) makes the backend's communicator number `index` of the same ranks. Null: the simulation.
    using MakeComm = std::function<ncclComm_t(CpuRank& rank, size_t index)>;
    CpuRank(ncclComm_t comm, int rank, int num_ranks, MakeComm make_comm)
        : RankContext(comm, rank, num_ranks), make_comm_(std::move(make_comm)) {}
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
    std::unique_ptr<Beside> run_beside(std::function<void()> body) override;
    void pause() override;
    void yield() override;
    bool is_simulated() const override { return make_comm_ == nullptr; }

    // The communicator is destroyed when the program has ended.
    ncclComm_t keep(ncclComm_t comm);

  private:
    MakeComm make_comm_;
    size_t num_made_ = 0;
    std::vector<ncclComm_t> kept_;
    std::map<void*, std::unique_ptr<std::byte[]>> allocations_;
};

}  // namespace crossdock::testing
