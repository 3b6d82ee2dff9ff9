// SPDX-License-Identifier: Apache-2.0
// Whether a library's dispatch and combine do what they should, told by plain loops that know every rank's tokens.
#pragma once

#include <cstdint>

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

// Of all ranks, on every rank. Collective.
Validation sum_over_ranks(const tools::RankContext& context, const Validation& own);

}  // namespace crossdock::bench
