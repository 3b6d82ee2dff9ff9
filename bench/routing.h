// SPDX-License-Identifier: Apache-2.0
// Which experts the tokens choose, and how many rows and bytes follow from it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/options.h"

namespace crossdock::bench {

// A sentence about a routing that is not to be had; empty if it is.
std::string check_routing(const std::string& routing);

// Expert ids [max_tokens][topk] of one rank. uniform: topk different experts. zipf:A: topk different ones, drawn with
// weights 1 / (1 + id)^A. FILE.npy: rows [tokens][>= topk] of the file, in turn from rank to rank, from its start again
// where it ends.
std::vector<int32_t> draw_routing(const Options& options, int rank);

// Rows that one rank's first num_tokens tokens cause. Self-traffic included unless said otherwise.
struct RowCounts {
    uint64_t selections = 0;         // entries >= 0
    uint64_t rank_rows = 0;          // different (token, rank) pairs
    uint64_t remote_selections = 0;  // of them, on other ranks
    uint64_t remote_rank_rows = 0;
    uint64_t selections_in = 0;  // rows that arrive here
    uint64_t rank_rows_in = 0;
    std::vector<uint64_t> selections_to;  // [ranks]
    std::vector<uint64_t> rank_rows_to;   // [ranks]
};

// routing: that of all ranks, [ranks][max_tokens][topk].
RowCounts count_rows(const Options& options, const std::vector<int32_t>& routing, int rank, int num_tokens);

}  // namespace crossdock::bench
