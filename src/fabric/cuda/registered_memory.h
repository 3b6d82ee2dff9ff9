// SPDX-License-Identifier: Apache-2.0
// Symmetric memory of an NCCL communicator: NCCL's allocation, registered as a window.
#pragma once

#include <memory>

#include "fabric/communicator.h"
#include "fabric/cuda/bounded.h"
#include "fabric/cuda/nccl_api.h"

namespace crossdock {

// Who a rank is in an NCCL communicator.
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

// Local. What NCCL says of the communicator.
ncclCommProperties_t properties_of(const NcclRank& self);

// Address on this rank's GPU of the piece of `rank`, which is in this rank's LSA team; of all ranks of the team. Local,
// host only.
std::byte* address_in_window(const NcclRank& self, ncclWindow_t window, int rank);
PeerMap peers_of_window(const NcclRank& self, ncclWindow_t window);

// Owns allocation and window. Must go before NCCL's communicator does.
class RegisteredMemory final : public SymmetricMemory {
  public:
    // Local: allocates and zeroes; when it returns the zeroes are in place.
    RegisteredMemory(const NcclRank& self, size_t bytes, cudaStream_t stream);
    ~RegisteredMemory() override;
    RegisteredMemory(const RegisteredMemory&) = delete;
    RegisteredMemory& operator=(const RegisteredMemory&) = delete;

    // Collective: registers and fills in local and peers. NCCL waits for the other ranks without a limit of its own,
    // hence register_memory.
    void map();

    ncclWindow_t window() const { return window_; }

  private:
    NcclRank self_;
    void* allocation_ = nullptr;
    ncclWindow_t window_ = nullptr;
};

// Collective: maps memory until the deadline, then Error with ncclRemoteError that mentions `what`. The memory is then
// left to a thread that frees it when NCCL comes back.
std::unique_ptr<RegisteredMemory> register_memory(std::unique_ptr<RegisteredMemory> memory, const char* what,
                                                  Deadline deadline);

}  // namespace crossdock
