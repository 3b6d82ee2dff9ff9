// SPDX-License-Identifier: Apache-2.0
// A device communicator of a CPU rank: teams, and symmetric memory for signals, counters and barriers.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/process.h"
#include "crossdock/device/entry.hpp"
#include "device_api/caller.h"
#include "device_api/outbox.h"
#include "device_api/simulated_gin.h"
#include "fabric/cpu/cpu_communicator.h"

namespace crossdock::device_api {

// Signals of barriers have this bit, so that a program cannot reach them with a wrong number.
inline constexpr uint32_t kBarrierSignal = uint32_t{1} << 31;

// Number of consecutive ranks per LSA team: NCCL_LSA_TEAM_SIZE, or all of a host. Throws if it does not divide those.
int lsa_size(cpu::CpuCommunicator& communicator);

class DeviceComm {
  public:
    // Collective. Throws ncclInvalidArgument on every rank if needs are out of range or differ.
    DeviceComm(std::shared_ptr<cpu::CpuCommunicator> communicator, const crossdockDevCommNeeds& needs, uint64_t id);

    crossdockDevCommView view;
    crossdockDevCommNeeds needs;
    std::shared_ptr<cpu::CpuCommunicator> communicator;
    std::shared_ptr<SimulatedGin> simulated;  // null outside of the simulation
    MakerProcess maker;

    // signal: the program's, or with kBarrierSignal. Throws if it does not exist; the message begins with caller.
    uint64_t* signal(int rank, int context, uint32_t signal, const Caller& caller) const;
    uint64_t* counter(int context, uint32_t counter, const Caller& caller) const;
    uint64_t* shadow(int context, uint32_t signal, const Caller& caller);
    // Offset of the signal in remote() memory, on every rank.
    uint64_t signal_offset(int context, uint32_t signal, const Caller& caller) const {
        return sizeof(uint64_t) * signal_index(context, signal, caller);
    }
    cpu::RemoteMemory* remote() const { return memory_->remote; }
    // The word of a barrier at the communicator's rank `owner` that LSA rank `from` writes.
    uint64_t* lsa_inbox(int owner, uint32_t barrier, int from) const;

    // How often a barrier has signalled an LSA rank, and has waited for it. 64 bits, which no program counts through.
    struct LsaEpochs {
        uint64_t told = 0, awaited = 0;
    };
    LsaEpochs& lsa_epochs(uint32_t barrier, int peer);

    // Barriers in use (kind, number, index), and the threads that use them.
    struct Use {
        int leader;
        int num_threads;
    };
    std::map<std::tuple<bool, uint32_t, uint32_t>, Use> uses;

  private:
    size_t signal_index(int context, uint32_t signal, const Caller& caller) const;
    // The memory has the signals of all contexts, then their counters, then the inboxes. No two contexts share a cache
    // line, because independent threads use them.
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
    // Null in the simulation. Last member: its destructor still writes counters.
    std::unique_ptr<Outbox> outbox;
};

// Throws ncclInvalidUsage if it does not exist, was destroyed, or was created by the parent of a forked child.
DeviceComm& find_device_comm(uint64_t id);

// Waits, a few seconds at most, until all sources that the communicator's device communicators have posted are read, so
// that memory may be freed.
void drain(const cpu::CpuCommunicator& communicator);

}  // namespace crossdock::device_api
