// SPDX-License-Identifier: Apache-2.0
// The common base of the CPU backends' communicators: host exchange, windows, runtime.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "fabric/communicator.h"
#include "fabric/cpu/exchange.h"
#include "runtime/cpu/cpu_runtime.h"
#include "runtime/cpu/ended_peers.h"

namespace crossdock::cpu {

// CROSSDOCK_JOIN_TIMEOUT_MS, default 60 s: timeout of joining and of crossdock.h's collectives, the least of making
// groups and handles.
uint64_t join_timeout_ns();
// CROSSDOCK_NETWORK_TIMEOUT_MS, default 100 s: a rank on another host is declared lost after this long without
// accepting data.
uint64_t network_timeout_ns();

// InvalidArgument if a CPU communicator cannot have so many ranks.
void require_num_ranks(int num_ranks);

class CpuCommunicator : public Communicator, protected PeerLosses {
  public:
    ~CpuCommunicator() override;
    const BackendTraits& backend() const final { return backend_; }
    int rank() const final { return rank_; }
    int num_ranks() const final { return num_ranks_; }
    Runtime& runtime() final { return runtime_; }
    void all_gather(const void* own, void* all, size_t bytes, const char* what, uint64_t timeout_ns) final;
    uint64_t setup_timeout_ns(uint64_t timeout_ns) const final { return std::max(timeout_ns, join_timeout_ns()); }
    WindowView window(ncclWindow_t handle) final;
    // Changes when a window of any communicator is registered or deregistered; until then views are valid.
    static uint64_t num_window_changes();
    // The window whose local memory contains the address, and the offset in it; null: none.
    ncclWindow_t window_at(const std::byte* address, size_t* offset);
    // Number of ranks that share this machine's cores.
    virtual int ranks_on_machine() const { return lsa_team_size(); }
    // The handle with which own kernels use NCCL's Device API (device_api/own_kernels.h).
    NetworkHandle network_of(const SymmetricMemory& memory) override {
        return {memory.local, memory.peers, device_comm_.get(), const_cast<SymmetricMemory*>(&memory)};
    }

    // Collective, bounded by timeout_ns. Throws ncclInvalidArgument on all ranks if sizes differ or one rank's memory
    // is not suitable.
    ncclWindow_t register_window(void* memory, size_t bytes, uint64_t timeout_ns);
    // Collective: when it returns, no peer accesses this rank's memory through the window any more.
    void deregister_window(ncclWindow_t handle, uint64_t timeout_ns);

  protected:
    CpuCommunicator(const BackendTraits& backend, int rank, int num_ranks, std::unique_ptr<Exchange> exchange,
                    std::shared_ptr<Executor> executor);

    // Makes all ranks' memory reachable. Collective.
    virtual std::unique_ptr<SymmetricMemory> map_window(void* memory, size_t bytes, uint64_t timeout_ns) = 0;

    void require_same_size(const std::vector<uint64_t>& bytes, const char* what) const;

    bool has_left(int rank) { return exchange_->has_left(rank); }

    bool has_ended(int rank) final { return !why_gone(rank).empty(); }
    // A rank that left in order without a report is named only if no other one is lost.
    int rank_to_name(int rank) final;
    void report_loss(int rank) final;

    // The peer is gone, or went on without this rank: throws ncclRemoteError that names the lost rank, and reports it.
    [[noreturn]] void fail_for(int peer, const char* what, const std::string& reason);

    // Throws ncclSystemError if this machine has too little memory for `bytes` of symmetric memory per rank.
    void expect_room(size_t bytes) const;

  private:
    struct Window {
        std::unique_ptr<SymmetricMemory> memory;
        uint64_t number;  // of its registration, equal on all ranks
    };

    // Waits until has_come(peer), which is not called again after it was true, for all ranks, including this one.
    void wait_for_all(const std::function<bool(int peer)>& has_come, const char* what, uint64_t start_ns,
                      uint64_t deadline_ns);
    const BackendTraits& backend_;
    int rank_;
    int num_ranks_;
    std::unique_ptr<Exchange> exchange_;
    std::shared_ptr<Executor> executor_;
    CpuRuntime runtime_;
    std::shared_ptr<const void> device_comm_;
    uint64_t num_calls_ = 0;  // of all_gather
    std::atomic<int> reported_{-1};
    std::mutex windows_mutex_;
    std::map<ncclWindow_t, Window> windows_;
    uint64_t num_registrations_ = 0;
};

}  // namespace crossdock::cpu
