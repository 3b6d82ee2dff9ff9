// SPDX-License-Identifier: Apache-2.0
// Symmetric memory of an NCCL communicator: NCCL's allocation, registered as a window.
#pragma once

#include <memory>

#include "fabric/communicator.h"
#include "fabric/cuda/bounded.h"
#include "fabric/cuda/nccl_api.h"

namespace crossdock {

// A rank of an NCCL communicator.
struct NcclRank {
    const NcclApi* nccl = nullptr;
    ncclComm_t comm = nullptr;
    int rank = 0;
    int num_ranks = 0;
    int device = 0;
    int lsa_team_size = 0;

    int first_of_team() const { return rank / lsa_team_size * lsa_team_size; }
    bool is_in_lsa_team(int peer) const { return peer / lsa_team_size == rank / lsa_team_size; }
};

// NCCL's properties of the communicator. Local.
ncclCommProperties_t properties_of(const NcclRank& self);

// Addresses on this rank's GPU: of the piece of `rank`, which is in this rank's LSA team, and of all ranks of the team.
// Local, host only.
std::byte* address_in_window(const NcclRank& self, ncclWindow_t window, int rank);
PeerMap peers_of_window(const NcclRank& self, ncclWindow_t window);

// Owns an allocation and its window. Destroy it before NCCL's communicator.
class RegisteredMemory final : public SymmetricMemory {
  public:
    // Local: allocates and zeroes, synchronously.
    RegisteredMemory(const NcclRank& self, size_t bytes, cudaStream_t stream);
    ~RegisteredMemory() override;
    RegisteredMemory(const RegisteredMemory&) = delete;
    RegisteredMemory& operator=(const RegisteredMemory&) = delete;

    // Collective: registers and fills in local and peers. NCCL waits for the other ranks without a timeout; use
    // register_memory().
    void map();

    ncclWindow_t window() const { return window_; }
    // What was registered. The window maps it again, at `local`.
    std::byte* allocation() const { return static_cast<std::byte*>(allocation_); }

  private:
    NcclRank self_;
    void* allocation_ = nullptr;
    ncclWindow_t window_ = nullptr;
};

// Collective: maps memory. At the deadline it throws ncclRemoteError that mentions `what`; another thread then frees
// the memory when NCCL returns.
std::unique_ptr<RegisteredMemory> register_memory(std::unique_ptr<RegisteredMemory> memory, const char* what,
                                                  Deadline deadline);

}  // namespace crossdock
