// SPDX-License-Identifier: Apache-2.0
// The two kinds of backends, behind run_ranks.
#pragma once

#include "run_ranks.h"

namespace crossdock::testing {

RunReport run_on_cpus(const BackendSpec& spec, int num_ranks, const RankProgram& program);
RunReport run_on_gpus(const BackendSpec& spec, int num_ranks, const RankProgram& program);
std::string why_not_on_cpus(Backend kind);
std::string why_no_gpu();

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
