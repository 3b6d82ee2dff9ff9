// SPDX-License-Identifier: Apache-2.0
// High-throughput routing in plain loops: which rows a rank receives, and where.
#pragma once

#include "dispatch.h"

namespace crossdock::reference {

// A rank's receive tensor. FLAT: a row for every (source rank, token) with an expert here, in this order.
// Expert-major: a zone for every local expert with tokens, in order; in it a row for every (source rank, token) with
// that expert, in this order, then padding up to a multiple of the alignment. Of the rows past the budget nothing is
// left.
struct HtReceived {
    std::vector<RowSource> rows;
    size_t total = 0;               // rows before dropping, with padding
    std::vector<int64_t> counters;  // [L] FLAT: rows that are left of each expert; expert-major: of each zone
    std::vector<int64_t> offsets;   // [L] where zones start, at most the budget (expert-major)
};

// Where a token went: to row `row` of rank `target`, as `source`.
struct HtArrival {
    int target = 0;
    size_t row = 0;
    RowSource source;
};

// A problem's routing worked out for all ranks.
class HtRouting {
  public:
    explicit HtRouting(const Problem& problem);
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

}  // namespace crossdock::reference
