// SPDX-License-Identifier: Apache-2.0
// The backends one by one, behind run_ranks.
#pragma once

#include "run_ranks.h"

namespace crossdock::testing {

RunReport run_as_threads(int num_ranks, const RankProgram& program);
RunReport run_as_processes(const BackendSpec& spec, int num_ranks, const RankProgram& program);
RunReport run_as_hosts(const BackendSpec& spec, int num_ranks, const RankProgram& program);
RunReport run_simulated(const BackendSpec& spec, int num_ranks, const RankProgram& program);
RunReport run_on_gpu_threads(int num_ranks, const RankProgram& program);
RunReport run_on_gpu_processes(const BackendSpec& spec, int num_ranks, const RankProgram& program);
std::string why_no_gpu();
std::string why_no_hosts();

// Runs the program and turns an exception that leaves it into a recorded failure.
void run_guarded(RankContext& context, const RankProgram& program);

// Forks a process per rank. In the child, `child` fills failures and digest; the parent collects them, within
// spec.limit_s.
struct ChildReport {
    std::vector<std::string> failures;
    uint64_t digest = 0;
};
RunReport fork_ranks(const BackendSpec& spec, int num_ranks, const std::function<ChildReport(int rank)>& child);

}  // namespace crossdock::testing
