// SPDX-License-Identifier: Apache-2.0
// Communicators whose ranks share one address space: the backends threads and simulation.
#pragma once

#include <functional>

#include "fabric/cpu/cpu_communicator.h"
#include "runtime/cpu/scheduler.h"

namespace crossdock::cpu {

// A communicator whose ranks are threads: one object per rank, in rank order.
std::vector<std::shared_ptr<CpuCommunicator>> make_thread_communicators(int num_ranks);

struct SimulationRun {
    uint64_t num_steps = 0;
    uint64_t trace_hash = 0;  // of the schedule; equal for equal seeds, programs and configurations
};

// Runs program(handle, rank) once per rank in a simulation, with communicators that live as long as the run. Throws
// like Simulation::run.
SimulationRun run_simulation(int num_ranks, const SimulationConfig& config,
                             const std::function<void(ncclComm_t, int)>& program);

}  // namespace crossdock::cpu
