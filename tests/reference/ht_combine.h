// SPDX-License-Identifier: Apache-2.0
// High-throughput combine in plain loops.
#pragma once

#include "combine.h"
#include "ht_dispatch.h"

namespace crossdock::reference {

// The output row of a token, bit for bit: FLAT adds one row per rank, in fp32 from 0 in ascending order of ranks, and
// rounds once. Expert-major first adds the rows of each rank, in fp32 in ascending order of local experts, and rounds
// the sum to the token's type. With several LSA teams of that many ranks, the rows of another team than the
// source's are added first, in the same way, and rounded; that sum takes their place. 0: one team.
// Invariant: the rows of all ranks, in the order of the token's choices.
// With MXFP8 the sum of each rank is quantised as through_mxfp8 says (formats.h) before it is added; one team.
std::vector<std::byte> combined_row(const Problem& problem, const HtRouting& routing, int source, int token,
                                    int lsa_team_size = 0);

// The same in fp64, and how far any correct result may be from it. MXFP8: e4m3 has 3 bits behind the point, so an
// element is off by at most 1/16 of itself; below its normal numbers by 2^-10 of the scale, which is less than 1/224 of
// the block's largest magnitude, or 2^-127.
BoundedRow bounded_row(const Problem& problem, const HtRouting& routing, int source, int token, int lsa_team_size = 0);

// Backward: the gradient of the weight of a token's local expert that `target` hands to combine.
float weight_gradient(const Problem& problem, int target, int source, int token, int local_expert);

// Backward: the gradients of a token's weights, [K]: what the expert's rank supplied; 0 for a choice that went nowhere.
std::vector<float> combined_weights(const Problem& problem, const HtRouting& routing, int source, int token);

}  // namespace crossdock::reference
