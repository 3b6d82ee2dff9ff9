// SPDX-License-Identifier: Apache-2.0
// Whether a library's dispatch and combine do what they should, told by plain loops that know every rank's tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/options.h"
#include "bench/workload.h"
#include "tools/common/ranks.h"

namespace crossdock::bench {

struct Validation {
    uint64_t num_rows = 0;  // that arrived, or should have
    uint64_t wrong_rows = 0;
    uint64_t num_values = 0;  // of combine's results
    uint64_t wrong_values = 0;
    double largest_part = 0;  // largest error as a part of the value's bound

    bool passed() const { return num_rows > 0 && num_values > 0 && wrong_rows == 0 && wrong_values == 0; }
};

// Runs one pair over num_tokens tokens a rank and checks it; collective. routing: all ranks',
// [ranks][max_tokens][topk]. The rows of a zone may come in any order. Combine's bound: nccl_ep.h's one rounding
// (crossdock.h's for sums at the sender) and the fp32 roundings of the sum. On every rank: the sums over all ranks.
Validation validate(const tools::RankContext& context, const Options& options, const std::vector<int32_t>& routing,
                    int num_tokens, Workload& workload, tools::Device& device);

}  // namespace crossdock::bench
