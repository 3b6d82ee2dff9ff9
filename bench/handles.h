// SPDX-License-Identifier: Apache-2.0
// What a handle for every forward pass costs the host: its slowest calls, and the memory that stays.
#pragma once

#include "bench/options.h"
#include "bench/workload.h"

namespace crossdock::bench {

// Times options.num_handles passes of this rank, each with a handle of its own, and prints one line on rank 0.
// Collective.
void measure_handles(const tools::RankContext& context, const Options& options, tools::Device& device,
                     Workload& workload);

}  // namespace crossdock::bench
