// SPDX-License-Identifier: Apache-2.0
// A small all-gather of host bytes over symmetric GPU memory, done by copies; between LSA teams by puts.
#pragma once

#include <memory>

#include "fabric/cuda/registered_memory.h"
#include "runtime/cuda/cuda_runtime.h"

namespace crossdock {

// Why not NCCL's own all-gather: its kernel needs room beside kernels that may wait for this rank, its first use
// connects all ranks and allocates buffers, and it cannot say who is missing. Copies need neither SMs nor connections,
// and flags have names.
//
// Memory of a rank: 2 x num_ranks slots, then as many 64-bit flags. Round n uses half n % 2: rank r copies its bytes
// into slot r of every rank, then n into flag r; in other teams a kernel of one block puts both. Whoever has seen all
// flags of round n has its bytes; it enters round n
// + 1 only after reading them, and no rank can enter round n + 2 and so come back to this half before all have entered
// round n + 1.
class Mailbox {
  public:
    // Collective. device_comm: null where there is one team.
    Mailbox(const NcclRank& self, CudaRuntime& runtime, const void* device_comm, const char* what, Deadline deadline);
    ~Mailbox();
    Mailbox(const Mailbox&) = delete;
    Mailbox& operator=(const Mailbox&) = delete;

    // Every rank's bytes in rank order. Collective, blocking; at the deadline Error with ncclRemoteError that names
    // `what` and the ranks that did not come. The ranks are then out of step: from there on every call fails at once.
    void all_gather(const void* own, void* all, size_t bytes, const char* what, Deadline deadline);

  private:
    void put_to_other_teams(size_t half, size_t bytes, uint64_t round, cudaStream_t stream);
    void run_round(const std::byte* own, size_t bytes, const char* what, Deadline deadline);

    NcclRank self_;
    CudaRuntime& runtime_;
    const void* device_comm_;
    std::unique_ptr<RegisteredMemory> memory_;
    std::byte* staging_ = nullptr;  // pinned: one half's slots, then its flags
    uint64_t round_ = 0;
    bool out_of_step_ = false;
};

}  // namespace crossdock
