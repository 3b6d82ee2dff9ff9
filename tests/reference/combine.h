// SPDX-License-Identifier: Apache-2.0
// Low-latency combine in plain loops.
#pragma once

#include "dispatch.h"

namespace crossdock::reference {

// The output row of a token where rows travel unchanged and sums are exact: fp32, fused multiply-adds from 0 in
// ascending k (expert-major), or additions from 0 in the order of each rank's first k (rank-major), one rounding. Bit
// for bit.
std::vector<std::byte> combined_row(const Problem& problem, int source, int token, const ActiveRanks& active = {});

// The output row in fp64, and how far any correct result may be from it.
struct BoundedRow {
    std::vector<double> sum;
    std::vector<double> bound;
};
BoundedRow bounded_row(const Problem& problem, int source, int token, const ActiveRanks& active = {});

}  // namespace crossdock::reference
