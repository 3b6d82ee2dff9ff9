// SPDX-License-Identifier: Apache-2.0
// What the tests of failing ranks share.
#pragma once

#include "layer.h"
#include "options.h"
#include "random_problem.h"

namespace crossdock::testing {

// A problem in which every rank sends to every other.
Problem busy_problem(int num_ranks, ncclEpLayout_t layout, uint64_t seed);

// The rank's view of who is active.
ActiveRanks query_mask(RankContext& context, ncclEpGroup_t group);

int async_error(RankContext& context, ncclEpGroup_t group);

// Checks that the group's last expired wait was for `peer`.
void check_diagnosis(RankContext& context, ncclEpGroup_t group, int peer);

// Whether anything is left of this program's shared memory: the names in /dev/shm.
std::vector<std::string> shared_memory_names();

// The failures of all ranks but one, which may say what it likes.
std::vector<std::string> failures_of_others(const RunReport& report, int rank);

}  // namespace crossdock::testing
