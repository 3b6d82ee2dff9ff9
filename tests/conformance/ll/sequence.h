// SPDX-License-Identifier: Apache-2.0
// Long random sequences of legal operations over several handles, groups and communicators. The script comes from a
// seed, so every rank does the same in the same order, as the contract asks.
#pragma once

#include "conformance/ll/layer.h"
#include "conformance/ll/random_problem.h"

namespace crossdock::testing {

struct SequenceShape {
    int num_groups = 1;
    int layers_per_group = 3;
    int num_steps = 60;
    bool two_communicators = false;
    ProblemLimits limits;
};

// Runs a script and checks every operation, some of them long after others have been issued.
void run_sequence(RankContext& context, const SequenceShape& shape, uint64_t seed);

}  // namespace crossdock::testing
