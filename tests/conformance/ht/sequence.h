// SPDX-License-Identifier: Apache-2.0
// A random script of operations on several high-throughput handles, in several groups of one communicator, with
// low-latency handles between them. Every rank runs the same script.
#pragma once

#include "conformance/ht/random_problem.h"

namespace crossdock::testing {

struct HtSequenceShape {
    int num_groups = 1;
    int layers_per_group = 3;
    int low_latency_layers = 0;  // in a group of their own
    int num_steps = 40;
    bool windows = false;
    HtLimits limits;
};

// Runs a script and checks every operation, some of them long after others have been issued.
void run_ht_sequence(RankContext& context, const HtSequenceShape& shape, uint64_t seed);

}  // namespace crossdock::testing
