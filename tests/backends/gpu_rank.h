// SPDX-License-Identifier: Apache-2.0
// A rank on a GPU. Ranks may share a GPU, and ranks that are threads also share its context. A call that waits for the
// whole device, as cudaFree does, would then wait for kernels of other ranks, which wait for this one: so memory comes
// from a pool that was allocated beforehand, copies use streams of their own, and what must synchronise happens between
// barriers.
#pragma once

#include <cuda_runtime_api.h>

#include <map>

#include "host_exchange.h"
#include "rank_context.h"

namespace crossdock::testing {

// Throws if a CUDA call failed.
void check_cuda(cudaError_t result, const char* call);

// Of a rank: bump allocation, freed pieces are reused for requests of the same size.
class DevicePool {
  public:
    explicit DevicePool(size_t bytes);
    ~DevicePool();
    DevicePool(const DevicePool&) = delete;
    DevicePool& operator=(const DevicePool&) = delete;
    void* allocate(size_t bytes);
    void free(void* memory);

  private:
    std::byte* memory_ = nullptr;
    size_t bytes_;
    size_t used_ = 0;
    std::map<void*, size_t> sizes_;
    std::multimap<size_t, void*> free_;
};

class GpuRank : public RankContext {
  public:
    // make_comm(index) joins, or finds, this rank's communicator number `index`; 0 is the given one.
    using MakeComm = std::function<ncclComm_t(int index)>;
    GpuRank(ncclComm_t comm, int rank, int num_ranks, bool is_process, HostExchange& exchange, MakeComm make_comm);
    ~GpuRank() override;

    void* allocate(size_t bytes) override { return pool_.allocate(bytes); }
    void deallocate(void* memory) override { pool_.free(memory); }
    void copy_to_device(void* target, const void* source, size_t bytes, cudaStream_t stream) override;
    void copy_to_host(void* target, const void* source, size_t bytes, cudaStream_t stream) override;
    cudaStream_t make_stream() override;
    void synchronize(cudaStream_t stream) override;
    bool has_graphs() const override { return true; }
    // Collective: making a graph may synchronise.
    Graph capture(cudaStream_t stream, const std::function<void()>& work) override;
    std::vector<unsigned> captured_blocks(cudaStream_t stream, const std::function<void()>& work) override;
    void launch(Graph graph, cudaStream_t stream) override;
    Window make_window(size_t bytes) override;
    void destroy_window(const Window& window) override;
    void barrier() override { exchange_.barrier(); }
    void all_gather(const void* own, void* all, size_t bytes) override {
        exchange_.all_gather(rank(), own, all, bytes);
    }
    ncclComm_t make_communicator() override { return make_comm_(++num_made_); }
    bool is_gpu() const override { return true; }

    // Everything that this rank enqueued is done.
    void synchronize_all();

  private:
    cudaGraph_t capture_graph(cudaStream_t stream, const std::function<void()>& work);

    bool is_process_;
    HostExchange& exchange_;
    MakeComm make_comm_;
    int num_made_ = 0;
    DevicePool pool_;
    std::vector<cudaStream_t> streams_;
    size_t next_stream_ = 0;
    std::vector<cudaGraphExec_t> graphs_;
};

}  // namespace crossdock::testing
