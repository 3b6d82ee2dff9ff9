// SPDX-License-Identifier: Apache-2.0
// A small all-gather of host bytes over symmetric memory: copies within an LSA team, puts between teams.
#pragma once

#include <memory>
#include <optional>

#include "fabric/cuda/registered_memory.h"
#include "runtime/cuda/cuda_runtime.h"

namespace crossdock {

// After the ranks' first exchange (host_memory.h), NCCL's own all-gather does not fit: its kernel needs SMs beside
// kernels that may wait for this rank, its first use connects all ranks and allocates buffers, and it does not name
// missing ranks. Copies need neither SMs nor connections.
//
// Memory of a rank: 2 x num_ranks slots, then as many 64-bit flags. Round n uses half n % 2: rank r copies its bytes
// into slot r of every rank, then n into flag r; in other teams a kernel of one block puts both. A rank that has seen
// all flags of round n has its bytes, and enters round n + 1 only after reading them. No rank can enter round n + 2,
// which reuses this half, before all have entered round n + 1.
class Mailbox {
  public:
    static size_t bytes(int num_ranks);

    // memory: bytes(num_ranks). gin: null if there is one team.
    Mailbox(const NcclRank& self, CudaRuntime& runtime, std::unique_ptr<SymmetricMemory> memory,
            std::optional<NetworkHandle> gin);
    ~Mailbox();
    Mailbox(const Mailbox&) = delete;
    Mailbox& operator=(const Mailbox&) = delete;

    // Gathers every rank's bytes in rank order. Collective, blocking. At the deadline it throws ncclRemoteError that
    // names `what` and the missing ranks. The ranks are then out of step, and every later call fails at once.
    void all_gather(const void* own, void* all, size_t bytes, const char* what, Deadline deadline);

  private:
    void put_to_other_teams(size_t half, size_t bytes, uint64_t round, cudaStream_t stream);
    void run_round(const std::byte* own, size_t bytes, const char* what, Deadline deadline);

    NcclRank self_;
    CudaRuntime& runtime_;
    std::unique_ptr<SymmetricMemory> memory_;
    std::optional<NetworkHandle> gin_;
    std::byte* staging_ = nullptr;  // pinned: one half's slots, then its flags
    uint64_t round_ = 0;
    bool out_of_step_ = false;
};

}  // namespace crossdock
