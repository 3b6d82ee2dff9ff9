// SPDX-License-Identifier: Apache-2.0
// One rank of the benchmark.
#pragma once

#include <vector>

#include "bench/options.h"
#include "bench/results.h"
#include "tools/common/ranks.h"

namespace crossdock::bench {

// Measures all cases; rank 0 reports. Throws std::exception where the rank cannot go on, and on rank 0 where a
// validation failed.
void run_rank(const tools::RankContext& context, const Options& options);

}  // namespace crossdock::bench
