// SPDX-License-Identifier: Apache-2.0
// The simulation's runtime: all ranks' programs and all warps of their launches on the calling thread, in
// simulated time.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/cpu/executor.h"
#include "runtime/cpu/scheduler.h"
#include "runtime/cpu/slot_checker.h"

namespace crossdock::cpu {

class Simulation {
  public:
    Simulation(int num_ranks, const SimulationConfig& config);
    ~Simulation();

    // Runs program(rank) as a fiber for every rank until all return; with are_processes each starts at a time of its
    // own. Call it once. Throws ncclInternalError, with the seed in the message, for the first violation of the
    // protocol or a deadlock; otherwise what the first failing program threw.
    void run(const std::function<void(int)>& program);

    // Launches kernels and waits for a rank's program. Valid during run().
    Executor& executor(int rank);

    SlotChecker& checker() { return checker_; }
    SimulatedNetwork& network() { return scheduler_.network(); }
    GarbageWriter& garbage() { return scheduler_.garbage(); }
    bool is_killed(int rank) const { return scheduler_.is_killed(rank); }
    // With are_processes: the rank was killed, or its program has returned.
    bool has_ended(int rank) const;
    uint64_t num_steps() const { return scheduler_.num_steps(); }
    uint64_t trace_hash() const { return scheduler_.trace_hash(); }

  private:
    Scheduler scheduler_;
    SlotChecker checker_;
    std::vector<std::unique_ptr<Executor>> executors_;
    std::vector<bool> has_returned_;  // per rank
};

}  // namespace crossdock::cpu
