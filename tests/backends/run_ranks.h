// SPDX-License-Identifier: Apache-2.0
// One harness for all backends: runs a program once per rank and gathers what went wrong.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "crossdock/simulation.h"
#include "device/cpu/fault.h"
#include "rank_context.h"
#include "tools/common/backend.h"

namespace crossdock::testing {

class HostNetwork;

struct BackendSpec {
    Backend kind = Backend::kThreads;
    crossdockSimulationConfig_t simulation = CROSSDOCK_SIMULATION_CONFIG_INIT;
    cpu::Fault fault = cpu::Fault::kNone;  // kSimulation
    int ranks_per_host = 0;                // 0: all ranks are on one
    HostNetwork* network = nullptr;        // kHosts: the hosts are those of this network, instead of mere names
    std::vector<int> doomed;               // processes that a signal may end without a failure
    int limit_s = 600;                     // processes still running then are killed, and it is a failure
};

struct RunReport {
    std::vector<std::string> failures;  // of all ranks, and of the backend itself
    std::vector<uint64_t> digests;      // of each rank; 0 for one that died
    uint64_t num_steps = 0;             // simulation
    bool ok() const { return failures.empty(); }
};

using RankProgram = std::function<void(RankContext&)>;

// Runs program on every rank and returns when all have ended. Exceptions of a program end it; all but StopProgram are
// failures. Processes are forked here, so the caller has no other threads then.
RunReport run_ranks(const BackendSpec& spec, int num_ranks, const RankProgram& program);

// What runs have kept for later ones. A program that ran any calls it before main returns: NCCL's threads must not
// outlive what they use.
void free_kept_communicators();

// Empty if the backend can run here, else why not.
std::string why_unavailable(Backend kind);

}  // namespace crossdock::testing
