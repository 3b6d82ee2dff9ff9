// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>
#include <vector>

#include "bench/gate.h"
#include "bench/gpu.h"
#include "crossdock/error.hpp"
#include "device/ptx.cuh"
#include "tools/common/nccl_library.h"

namespace crossdock::bench {
namespace {

using namespace ptx;

constexpr int kMaxRanks = 64;
constexpr uint64_t kStopPatienceNs = 1'000'000'000;
constexpr uint64_t kMeetingPatienceNs = 20'000'000'000;

__device__ void wait_for(const uint64_t* word, uint64_t number, uint64_t patience_ns) {
    const uint64_t start = global_timer_ns();
    while (load_acquire_system(word) < number && global_timer_ns() - start < patience_ns) {
    }
}

__global__ void wait_for_host(const uint64_t* word, uint64_t number) { wait_for(word, number, kStopPatienceNs); }

struct Meeting {
    uint64_t number;            // from 1, as all ranks count
    const uint64_t* own_words;  // [ranks], written by the peers
    uint64_t* words_of_peers[kMaxRanks];
};

// A thread per rank.
__global__ void meet_ranks(Meeting meeting) {
    store_release_system(meeting.words_of_peers[threadIdx.x], meeting.number);
    wait_for(meeting.own_words + threadIdx.x, meeting.number, kMeetingPatienceNs);
}

class KernelGate : public GpuGate {
  public:
    KernelGate(const tools::RankContext& context, ncclComm_t comm, tools::Device& device)
        : num_ranks_(context.num_ranks), comm_(comm), device_(device) {
        if (num_ranks_ > kMaxRanks) {
            throw std::runtime_error("streams are lined up among at most 64 ranks");
        }
        tools::check_cuda(cudaHostAlloc(reinterpret_cast<void**>(&host_word_), sizeof *host_word_, cudaHostAllocMapped),
                          "cudaHostAlloc");
        *host_word_ = 0;
        window_ = expect_gpu_window(comm, kMaxRanks * sizeof(uint64_t));
        const std::vector<uint64_t> zeros(kMaxRanks);
        device.to_device(window_.memory, zeros.data(), zeros.size() * sizeof(uint64_t));
        meeting_.own_words = static_cast<const uint64_t*>(window_.memory);
        for (int peer = 0; peer < num_ranks_; ++peer) {
            void* word = nullptr;
            tools::check_nccl(tools::nccl_library().get_lsa_device_pointer(
                                  window_.window, static_cast<size_t>(context.rank) * sizeof(uint64_t), peer, &word),
                              "ncclGetLsaDevicePointer");
            meeting_.words_of_peers[peer] = static_cast<uint64_t*>(word);
        }
        // Nobody's words are zeroed after a peer has come.
        check(crossdockCommBarrier(context.host));
    }
    ~KernelGate() override {
        free_gpu_window(comm_, window_);
        cudaFreeHost(host_word_);
    }

    void close() override {
        wait_for_host<<<1, 1, 0, device_.stream()>>>(host_word_, ++num_stops_);
        tools::check_cuda(cudaGetLastError(), "the launch of a stop");
    }
    void open() override { __atomic_store_n(host_word_, num_stops_, __ATOMIC_RELEASE); }
    void meet() override {
        ++meeting_.number;
        meet_ranks<<<1, static_cast<unsigned>(num_ranks_), 0, device_.stream()>>>(meeting_);
        tools::check_cuda(cudaGetLastError(), "the launch of a meeting");
    }

  private:
    int num_ranks_;
    ncclComm_t comm_;
    tools::Device& device_;
    GpuWindow window_;
    Meeting meeting_{};
    uint64_t* host_word_ = nullptr;
    uint64_t num_stops_ = 0;
};

}  // namespace

std::unique_ptr<GpuGate> make_gpu_gate(const tools::RankContext& context, ncclComm_t comm, tools::Device& device,
                                       std::string& why) {
    const int team_size = tools::lsa_team_size(comm, context.num_ranks);
    if (team_size < context.num_ranks) {
        why = "ranks begin together in one LSA team only, and these " + std::to_string(context.num_ranks) + " form " +
              std::to_string(context.num_ranks / team_size);
        return nullptr;
    }
    return std::make_unique<KernelGate>(context, comm, device);
}

}  // namespace crossdock::bench
