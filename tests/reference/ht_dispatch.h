// SPDX-License-Identifier: Apache-2.0
// High-throughput routing and dispatch in plain loops: which rows a rank receives, where, and what tells of them.
#pragma once

#include "ht_problem.h"

namespace crossdock::reference {

// A rank's receive tensor. FLAT: a row for every (source rank, token) with an expert here, in this order.
// Expert-major: a zone for every local expert with tokens, in order; in it a row for every (source rank, token) with
// that expert, in this order, then padding up to a multiple of the alignment. Of the rows past the budget nothing is
// left.
struct HtReceived {
    std::vector<HtRow> rows;
    size_t total = 0;               // rows before dropping, with padding
    std::vector<int64_t> counters;  // [L] FLAT: rows that are left of each expert; expert-major: of each zone
    std::vector<int64_t> offsets;   // [L] where zones start, at most the budget (expert-major)
};

// Where a token went: to row `row` of rank `target`, as `source`.
struct HtArrival {
    int target = 0;
    size_t row = 0;
    HtRow source;
};

// A problem's routing worked out for all ranks.
class HtRouting {
  public:
    explicit HtRouting(const HtProblem& problem);
    const HtReceived& received(int rank) const { return received_[rank]; }
    // The rows that are left of a token, in ascending order of rank, then of local expert.
    const std::vector<HtArrival>& arrivals(int source, int token) const { return arrivals_[source][token]; }
    // Whether a rank would receive more than the budget.
    bool overflows() const;

  private:
    size_t budget_;
    std::vector<HtReceived> received_;
    std::vector<std::vector<std::vector<HtArrival>>> arrivals_;
};

// FLAT: what a receiver gets to know of a row, [K] each: the local experts in ascending order with their weights, then
// -1 and 0.
struct HtMetadata {
    std::vector<int64_t> ids;
    std::vector<float> weights;
};
HtMetadata metadata_of(const HtProblem& problem, int target, const HtRow& row);

// FLAT: the local experts of a row, ascending.
std::vector<int> local_experts_of(const HtProblem& problem, int target, const HtRow& row);

}  // namespace crossdock::reference
