// SPDX-License-Identifier: Apache-2.0
// What this project's tests do with simulations. Users have crossdockRunSimulation.
#pragma once

#include <functional>
#include <memory>

#include "crossdock/simulation.h"
#include "device/cpu/fault.h"

namespace crossdock {

// crossdockRunSimulation with the fault.
ncclResult_t run_simulation_with_fault(cpu::Fault fault, int num_ranks, const crossdockSimulationConfig_t* config,
                                       crossdockRankProgram_t program, void* context, uint64_t* num_steps);

// Runs beside the program of the calling rank, as a kernel on another stream runs beside those of the library.
class SimulatedTask {
  public:
    SimulatedTask(ncclComm_t comm, std::function<void()> body);
    ~SimulatedTask();  // waits until the body has ended, and drops what it threw
    SimulatedTask(const SimulatedTask&) = delete;
    SimulatedTask& operator=(const SimulatedTask&) = delete;

    // Waits until the body has ended. Throws what it threw.
    void join();
    // By the program or the body. After a failed look at what others write: lets them run.
    static void pause(ncclComm_t comm);
    // After a step of its own: lets others run.
    static void yield(ncclComm_t comm);

  private:
    struct State;
    std::unique_ptr<State> state_;  // null: joined
};

}  // namespace crossdock
