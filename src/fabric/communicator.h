// SPDX-License-Identifier: Apache-2.0
// What a group needs of a communicator, whatever the backend: who the ranks are, a small host exchange, symmetric
// memory, windows, and a runtime to launch kernels on. One object is one rank's end.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "device/network_handle.h"
#include "fabric/backend.h"
#include "nccl.h"

namespace crossdock {

class Runtime;
namespace cpu {
class RemoteMemory;
}

// A symmetric allocation: the same size on every rank, zeroed, mapped by all. Destroying it is local and frees this
// rank's view; callers pass a barrier first, so that no peer still writes.
class SymmetricMemory {
  public:
    virtual ~SymmetricMemory() = default;
    std::byte* local = nullptr;
    size_t bytes = 0;
    PeerMap peers;
    cpu::RemoteMemory* remote = nullptr;  // the way to ranks of other hosts; null: there are none
};

// A window registered by the user.
struct WindowView {
    std::byte* local = nullptr;
    size_t bytes = 0;
    PeerMap peers;
    uint64_t number = 0;                  // the same on all ranks, of each window another; 0: not known
    cpu::RemoteMemory* remote = nullptr;  // as of SymmetricMemory
};

// Stands for memory of ranks outside an LSA team: any access faults.
std::byte* unreachable_memory();

class Communicator {
  public:
    virtual ~Communicator() = default;

    virtual const BackendTraits& backend() const = 0;
    virtual int rank() const = 0;
    virtual int num_ranks() const = 0;
    virtual Runtime& runtime() = 0;

    // Every rank's `bytes` bytes, in rank order. Collective, blocking, bounded by timeout_ns: then an Error with
    // ncclRemoteError that says which ranks did not come to `what`.
    virtual void all_gather(const void* own, void* all, size_t bytes, const char* what, uint64_t timeout_ns) = 0;
    void barrier(const char* what, uint64_t timeout_ns);
    // How long to wait for ranks that may still be setting up memory, for a caller who would otherwise wait timeout_ns.
    virtual uint64_t setup_timeout_ns(uint64_t timeout_ns) const { return timeout_ns; }

    // Collective, blocking, bounded like all_gather.
    virtual std::unique_ptr<SymmetricMemory> allocate_symmetric(size_t bytes, uint64_t timeout_ns) = 0;

    // Local. Error with ncclInvalidArgument for a window that is not registered with this communicator.
    virtual WindowView window(ncclWindow_t handle) = 0;

    // Ranks in a row that load and store each other's memory. The communicator has num_ranks / lsa_team_size such
    // teams.
    virtual int lsa_team_size() const { return num_ranks(); }

    // How kernels reach symmetric memory of ranks outside their group's team, which may be smaller than the
    // communicator's.
    virtual NetworkHandle network_of(const SymmetricMemory& memory) = 0;

    // Ranks that share this rank's device (1 on a GPU of one's own); launches leave room for all of them.
    virtual int ranks_on_device() const { return 1; }

    // What is known of a peer that does not come, to end a message with; empty: nothing, it may still come.
    virtual std::string why_gone(int /*rank*/) { return {}; }

    // The rank was killed by fault injection: every call on it fails.
    virtual bool is_killed() const { return false; }
};

// The communicator behind a caller's ncclComm_t: a CPU communicator (found in the registry of live ones, never by
// dereferencing) or NCCL's. Shared: a group keeps its communicator's state alive even when the user destroys the
// communicator first.
std::shared_ptr<Communicator> communicator_of(ncclComm_t comm);

}  // namespace crossdock
