// SPDX-License-Identifier: Apache-2.0
// Simulations with a planted fault, for this project's tests. Users have crossdockRunSimulation.
#pragma once

#include "crossdock/simulation.h"
#include "device/cpu/fault.h"

namespace crossdock {

// crossdockRunSimulation with the fault.
ncclResult_t run_simulation_with_fault(cpu::Fault fault, int num_ranks, const crossdockSimulationConfig_t* config,
                                       crossdockRankProgram_t program, void* context, uint64_t* num_steps);

}  // namespace crossdock
