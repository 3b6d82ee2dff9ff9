// SPDX-License-Identifier: Apache-2.0
// Long random sequences of legal operations over several handles, groups and communicators of both modes. The script
// comes from a seed, so every rank does the same in the same order, as the contract asks.
#pragma once

#include "conformance/support/layer.h"
#include "conformance/support/options.h"

namespace crossdock::testing {

struct SequenceShape {
    std::vector<ProblemLimits> groups;  // of each its mode, and what bounds its problems
    int layers_per_group = 3;
    int num_steps = 60;
    bool windows = false;            // tensors of high throughput lie in windows, some of them
    bool two_communicators = false;  // every other group has a communicator of its own
};

// Runs a script and checks every operation, some of them long after others have been issued.
void run_sequence(RankContext& context, const SequenceShape& shape, uint64_t seed);

// Those of several seeds, each by 1 to 4 ranks.
void run_sequences(const BackendSpec& spec, SequenceShape shape, const Seeds& seeds);

}  // namespace crossdock::testing
