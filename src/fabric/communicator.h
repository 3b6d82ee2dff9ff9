// SPDX-License-Identifier: Apache-2.0
// A communicator as groups use it, independent of the backend: ranks, a small host exchange, symmetric memory, windows,
// and a runtime to launch kernels on. One object per rank.
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

// A symmetric allocation: the same size on every rank, zeroed, mapped by all. Its destructor is local and unmaps this
// rank's view; call a barrier first, so that no peer still writes.
class SymmetricMemory {
  public:
    virtual ~SymmetricMemory() = default;
    std::byte* local = nullptr;
    size_t bytes = 0;
    PeerMap peers;
    cpu::RemoteMemory* remote = nullptr;  // access to ranks on other hosts; null: none
};

// A window registered by the user.
struct WindowView {
    std::byte* local = nullptr;
    size_t bytes = 0;
    PeerMap peers;
    uint64_t number = 0;                  // equal on all ranks, unique per window; 0: not known
    cpu::RemoteMemory* remote = nullptr;  // as in SymmetricMemory
};

// The address of memory of ranks outside of an LSA team: any access faults.
std::byte* unreachable_memory();

class Communicator {
  public:
    virtual ~Communicator() = default;

    virtual const BackendTraits& backend() const = 0;
    virtual int rank() const = 0;
    virtual int num_ranks() const = 0;
    virtual Runtime& runtime() = 0;
    // The same for all objects of one ncclComm_t.
    virtual const void* identity() const { return this; }

    // Connects the ranks, unless they are. Collective, blocking, bounded like all_gather. Whoever makes a group calls
    // it first, with its timeout: the queries below and all collective calls would also do it, with the least timeout.
    virtual void connect(const char* /*what*/, uint64_t /*timeout_ns*/) {}

    // Gathers every rank's `bytes` bytes in rank order. Collective, blocking. After timeout_ns it throws
    // ncclRemoteError, whose message names `what` and the missing ranks.
    virtual void all_gather(const void* own, void* all, size_t bytes, const char* what, uint64_t timeout_ns) = 0;
    void barrier(const char* what, uint64_t timeout_ns);
    // The timeout of making groups and handles, in which ranks connect and map memory, and may come late; at least
    // timeout_ns.
    virtual uint64_t setup_timeout_ns(uint64_t timeout_ns) const = 0;

    // Collective, blocking, bounded like all_gather.
    virtual std::unique_ptr<SymmetricMemory> allocate_symmetric(size_t bytes, uint64_t timeout_ns) = 0;

    // Local. Throws ncclInvalidArgument for a window that is not registered with this communicator.
    virtual WindowView window(ncclWindow_t handle) = 0;

    // Number of consecutive ranks that load and store each other's memory. The communicator has num_ranks /
    // lsa_team_size such teams.
    virtual int lsa_team_size() const { return num_ranks(); }

    // Whether symmetric memory is the host's, because GPUs do not reach each other's. Then LSA peers do not reach what
    // is in a window, and every load and store of symmetric memory crosses PCIe. The same on all ranks.
    virtual bool shares_host_memory() const { return false; }

    // How kernels reach symmetric memory of ranks outside their group's team, which may be smaller than the
    // communicator's.
    virtual NetworkHandle network_of(const SymmetricMemory& memory) = 0;

    // After network_of: from now on only the network's signals write these words, at an offset of the memory.
    virtual void note_signal_words(const SymmetricMemory& /*memory*/, uint64_t /*offset*/, uint64_t /*words*/) {}

    // Whether a warp's store of 128 bytes arrives whole in the memory of every LSA peer, on which LL128 rows rely: not
    // over PCIe. The same on all ranks.
    virtual bool stores_lines_whole() const { return true; }

    // Number of ranks on this rank's device (1 if it has its own GPU). A launch uses at most its share of the SMs.
    virtual int ranks_on_device() const { return 1; }

    // Message suffix that says why a peer is lost; empty while it may still arrive.
    virtual std::string why_gone(int /*rank*/) { return {}; }

    // A wait was interrupted: destroying the communicator waits no longer than it must.
    virtual void stop_waiting() {}

    // The rank was killed by fault injection: every call on it fails.
    virtual bool is_killed() const { return false; }
};

// The communicator behind a caller's ncclComm_t: a CPU communicator (found in the registry of live ones, never by
// dereferencing) or NCCL's. Shared: a group keeps its communicator's state alive even when the user destroys the
// communicator first.
std::shared_ptr<Communicator> communicator_of(ncclComm_t comm);

}  // namespace crossdock
