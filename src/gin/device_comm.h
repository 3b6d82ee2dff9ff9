// SPDX-License-Identifier: Apache-2.0
// A device communicator of a CPU rank: teams, and symmetric memory for signals, counters and barriers.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/process.h"
#include "crossdock/device/entry.hpp"
#include "fabric/cpu/cpu_communicator.h"
#include "gin/caller.h"
#include "gin/outbox.h"
#include "gin/simulated_gin.h"

namespace crossdock::gin {

// Signals of barriers have this bit, so that no program reaches them by a wrong number.
inline constexpr uint32_t kBarrierSignal = uint32_t{1} << 31;

// Ranks in a row of an LSA team: NCCL_LSA_TEAM_SIZE, or all of a host. Error where the number does not divide those.
int lsa_size(cpu::CpuCommunicator& communicator);

class DeviceComm {
  public:
    // Collective. Error with ncclInvalidArgument on every rank if needs are out of range or differ.
    DeviceComm(std::shared_ptr<cpu::CpuCommunicator> communicator, const crossdockDevCommNeeds& needs, uint64_t id);

    crossdockDevCommView view;
    crossdockDevCommNeeds needs;
    std::shared_ptr<cpu::CpuCommunicator> communicator;
    std::shared_ptr<SimulatedGin> simulated;  // null outside of the simulation
    MakerProcess maker;

    // signal: of the program, or with kBarrierSignal. Error for one that does not exist, with caller as its beginning.
    uint64_t* signal(int rank, int context, uint32_t signal, const Caller& caller) const;
    uint64_t* counter(int context, uint32_t counter, const Caller& caller) const;
    uint64_t* shadow(int context, uint32_t signal, const Caller& caller);
    // Where the signal is in every rank's piece of the memory that ranks of other hosts reach by remote().
    uint64_t signal_offset(int context, uint32_t signal, const Caller& caller) const {
        return sizeof(uint64_t) * signal_index(context, signal, caller);
    }
    cpu::RemoteMemory* remote() const { return memory_->remote; }
    // Of barrier `barrier` of rank `owner` (of the world), the word that LSA rank `from` writes.
    uint32_t* lsa_inbox(int owner, uint32_t barrier, int from) const;

    // How often the barrier has told the LSA rank, and has waited for it.
    struct LsaEpochs {
        uint32_t told = 0, awaited = 0;
    };
    LsaEpochs& lsa_epochs(uint32_t barrier, int peer);

    // Barriers in use: kind, number, index; by whom, in how many threads.
    struct Use {
        int leader;
        int num_threads;
    };
    std::map<std::tuple<bool, uint32_t, uint32_t>, Use> uses;

  private:
    size_t signal_index(int context, uint32_t signal, const Caller& caller) const;
    // The memory has the signals of all contexts, then their counters, then the inboxes. No two contexts share a cache
    // line: they exist for threads that work independently.
    size_t first_counter() const { return static_cast<size_t>(view.num_contexts) * signals_per_context_; }
    size_t first_inbox() const {
        return first_counter() + static_cast<size_t>(view.num_contexts) * counters_per_context_;
    }

    int num_barrier_signals_;
    size_t signals_per_context_, counters_per_context_;
    std::unique_ptr<SymmetricMemory> memory_;
    std::vector<uint64_t> shadows_;
    std::vector<LsaEpochs> epochs_;

  public:
    // Null in the simulation. Last: while it ends it still writes counters.
    std::unique_ptr<Outbox> outbox;
};

// Error with ncclInvalidUsage for one that does not exist, or no longer, or that a forked child's parent made.
DeviceComm& find_device_comm(uint64_t id);

// All that the communicator's device communicators have posted is read from its source, as far as that takes no more
// than a few seconds: memory may go.
void drain(const cpu::CpuCommunicator& communicator);

}  // namespace crossdock::gin
