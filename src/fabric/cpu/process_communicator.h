// SPDX-License-Identifier: Apache-2.0
// Communicators whose ranks are processes. Those of one host share memory in anonymous files, which peers open through
// the owner's /proc entry; the kernel frees them with the last process, however it ends.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "fabric/cpu/cpu_communicator.h"
#include "fabric/cpu/peer_process.h"
#include "runtime/cpu/local_executor.h"

namespace crossdock::cpu {

class ProcessCommunicator : public CpuCommunicator {
  public:
    // local_processes: those of this host's ranks, which share memory; the first one is of rank first_local. executor:
    // used by this communicator only.
    ProcessCommunicator(int rank, int num_ranks, int first_local, const std::vector<ProcessIdentity>& local_processes,
                        std::unique_ptr<Exchange> exchange, const std::shared_ptr<LocalExecutor>& executor);

    std::unique_ptr<SymmetricMemory> allocate_symmetric(size_t bytes, uint64_t timeout_ns) override;
    int lsa_team_size() const final { return static_cast<int>(processes_.size()); }
    std::string why_gone(int rank) override;

  protected:
    std::unique_ptr<SymmetricMemory> map_window(void* memory, size_t bytes, uint64_t timeout_ns) override;
    std::string why_ended(int rank);  // empty: not known to have ended
    bool ends_soon(int rank);
    bool is_local(int rank) const { return rank >= first_local_ && rank < first_local_ + lsa_team_size(); }

  private:
    struct Offer;
    class MappedPeers;
    std::unique_ptr<MappedPeers> exchange(const Offer& own, std::byte* memory, std::string reason, ncclResult_t code,
                                          const char* what, uint64_t timeout_ns);

    int first_local_;
    std::vector<ProcessWatch> processes_;  // of this host's ranks
};

// For ranks of one host. Collective, bounded by join_timeout_ns(). Throws as crossdockCommInitRank says.
std::shared_ptr<CpuCommunicator> join_processes(const ncclUniqueId& id, int num_ranks, int rank);

}  // namespace crossdock::cpu
