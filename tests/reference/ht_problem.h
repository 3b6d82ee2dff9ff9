// SPDX-License-Identifier: Apache-2.0
// One high-throughput exchange, stated completely: what problem.h says, and what is high throughput's own.
#pragma once

#include "problem.h"

namespace crossdock::reference {

// recipe is kNone or kForward, layout FLAT or EXPERT_MAJOR.
struct HtProblem : Problem {
    size_t alignment = 1;  // of the experts' zones, in rows (expert-major)
    size_t budget = 0;     // rows that a rank can receive; 0: eager mode, where routing decides
    bool drops = false;    // rows past the budget are dropped, instead of failing the group
    int group_topk = 0;    // the group's num_topk; 0: unset

    // As many rows as any routing can bring to a rank.
    size_t most_rows() const;
    // The rows past which nothing is ever written: the budget, in eager mode the library's bound.
    size_t row_limit() const;
    std::string describe() const;
};

// A row of a rank's receive tensor: a token, and in the expert-major layout for which local expert; or padding.
struct HtRow {
    int source = -1;
    int token = 0;
    int expert = 0;  // local; FLAT: 0
    bool is_padding() const { return source < 0; }
};

// What the experts of rank `target` make of a row, in the forward and in the backward pass.
std::vector<std::byte> expert_row(const HtProblem& problem, int target, const HtRow& row);

// Backward: the gradient of the weight of a token's local expert that `target` hands to combine.
float weight_gradient(const HtProblem& problem, int target, int source, int token, int local_expert);

// The weight with which a token goes to an expert: of several choices of the same expert the last one's.
float weight_for(const Problem& problem, int source, int token, int64_t expert);

}  // namespace crossdock::reference
