// SPDX-License-Identifier: Apache-2.0
// The wire's lower bound: every rank writes its bytes into its peers' memory with bulk copies from shared memory, one
// issuing thread per block, and does nothing else. No library can be faster with the same bytes. Code for GPUs without
// bulk copies stores with all threads.
#include <stdexcept>

#include "bench/gpu.h"
#include "device/platform.h"
#include "device/ptx.cuh"
#include "tools/common/nccl_library.h"

namespace crossdock::bench {
namespace {

using namespace ptx;

constexpr int kMaxPeers = 64;
constexpr uint32_t kChunkBytes = 16384;
constexpr int kMaxBlocks = 128;
// Pending copies per block.
constexpr int kPending = 8;
constexpr int kThreads = 256;

struct BoundArguments {
    int num_rounds;
    uint64_t chunks_per_round;  // of the peer that gets most
    int num_peers;
    std::byte* target[kMaxPeers];  // the own part of a peer's window
    uint64_t bytes[kMaxPeers];     // multiples of 16
};

__device__ void write_chunk(std::byte* target, const std::byte* chunk, uint32_t bytes) {
    if constexpr (kHasBulkCopies) {
        bulk_store(target, chunk, bytes);
        bulk_commit_group();
        bulk_wait_group<kPending>();
    } else {
        for (uint32_t at = threadIdx.x * 16; at < bytes; at += kThreads * 16)
            *reinterpret_cast<uint4*>(target + at) = *reinterpret_cast<const uint4*>(chunk + at);
    }
}

__global__ void __launch_bounds__(kThreads) write_to_peers(BoundArguments arguments) {
    extern __shared__ __align__(128) std::byte chunk[];
    if (kHasBulkCopies && threadIdx.x != 0) {
        return;
    }
    // Chunk i of every peer goes to block i modulo the grid's size, peers interleaved, so that all links work at once;
    // the next round begins where the last one ended.
    const uint64_t num_chunks = arguments.chunks_per_round * static_cast<uint64_t>(arguments.num_rounds);
    for (uint64_t i = blockIdx.x; i < num_chunks; i += gridDim.x) {
        const uint64_t offset = i % arguments.chunks_per_round * kChunkBytes;
        for (int peer = 0; peer < arguments.num_peers; ++peer) {
            if (offset >= arguments.bytes[peer]) {
                continue;
            }
            const uint64_t left = arguments.bytes[peer] - offset;
            write_chunk(arguments.target[peer] + offset, chunk,
                        static_cast<uint32_t>(left < kChunkBytes ? left : kChunkBytes));
        }
    }
    if constexpr (kHasBulkCopies) bulk_wait_group<0>();
}

class BulkBound : public GpuLowerBound {
  public:
    BulkBound(const tools::RankContext& context, ncclComm_t comm, tools::Device& device, uint64_t max_bytes)
        : context_(context),
          comm_(comm),
          device_(device),
          team_size_(tools::lsa_team_size(comm, context.num_ranks)),
          stride_((max_bytes + kChunkBytes - 1) / kChunkBytes * kChunkBytes),
          window_(team_size_ > 1 ? expect_gpu_window(comm, stride_ * static_cast<uint64_t>(team_size_)) : GpuWindow{}) {
        if (team_size_ > kMaxPeers + 1) {
            throw std::runtime_error("the lower bound is measured among at most 65 ranks of an LSA team");
        }
        // Each rank begins with its neighbour, so that no rank is the first target of all others.
        for (int step = 1; step < team_size_; ++step) {
            void* target = nullptr;
            tools::check_nccl(
                tools::nccl_library().get_lsa_device_pointer(
                    window_.window, stride_ * static_cast<uint64_t>(place_after(0)), place_after(step), &target),
                "ncclGetLsaDevicePointer");
            arguments_.target[arguments_.num_peers++] = static_cast<std::byte*>(target);
        }
        int device_index = 0;
        int num_sms = 0;
        tools::check_cuda(cudaGetDevice(&device_index), "cudaGetDevice");
        tools::check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device_index),
                          "cudaDeviceGetAttribute");
        num_blocks_ = num_sms < kMaxBlocks ? num_sms : kMaxBlocks;
    }
    ~BulkBound() override {
        if (window_.memory != nullptr) free_gpu_window(comm_, window_);
    }

    int lsa_team_size() const override { return team_size_; }

    void enqueue(const std::vector<uint64_t>& bytes_to, int count) override {
        uint64_t most = 0;
        const int first = context_.rank - place_after(0);
        for (int step = 1; step < team_size_; ++step) {
            const uint64_t bytes = bytes_to[static_cast<size_t>(first + place_after(step))] / 16 * 16;
            arguments_.bytes[step - 1] = bytes;
            most = bytes > most ? bytes : most;
        }
        arguments_.num_rounds = count;
        arguments_.chunks_per_round = (most + kChunkBytes - 1) / kChunkBytes;
        write_to_peers<<<num_blocks_, kThreads, kChunkBytes, device_.stream()>>>(arguments_);
        tools::check_cuda(cudaGetLastError(), "launch of the lower bound's kernel");
    }

  private:
    // The rank in the team that is `step` places after this one.
    int place_after(int step) const { return (context_.rank % team_size_ + step) % team_size_; }

    tools::RankContext context_;
    ncclComm_t comm_;
    tools::Device& device_;
    int team_size_;
    uint64_t stride_;
    GpuWindow window_;
    BoundArguments arguments_{};
    int num_blocks_ = 1;
};

}  // namespace

std::unique_ptr<GpuLowerBound> make_gpu_lower_bound(const tools::RankContext& context, ncclComm_t comm,
                                                    tools::Device& device, uint64_t max_bytes) {
    return std::make_unique<BulkBound>(context, comm, device, max_bytes);
}

}  // namespace crossdock::bench
