// SPDX-License-Identifier: Apache-2.0
// Which experts the tokens choose, and how many rows and bytes follow from it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/options.h"

namespace crossdock::bench {

// A message about a routing that is not to be had; empty if it is.
std::string check_routing(const std::string& routing);

// Expert ids [max_tokens][topk] of one rank. uniform: topk different experts. zipf:A: topk different ones, drawn with
// weights 1 / (1 + id)^A. FILE.npy: rows [tokens][>= topk] of the file, in turn from rank to rank, from its start again
// where it ends.
std::vector<int32_t> draw_routing(const Options& options, int rank);

// Rows that all ranks' first tokens cause, from each rank to each.
class Traffic {
  public:
    // routing: that of all ranks, [ranks][max_tokens][topk].
    Traffic(const Options& options, const std::vector<int32_t>& routing, int num_tokens);

    int num_tokens() const { return num_tokens_; }
    uint64_t selections(int from, int to) const { return selections_[index(from, to)]; }  // entries >= 0
    uint64_t rank_rows(int from, int to) const { return rank_rows_[index(from, to)]; }    // different (token, rank)
    uint64_t selections_of(int from) const;  // to all ranks, `from` included
    uint64_t rank_rows_of(int from) const;
    uint64_t selections_for(int to) const;  // from all ranks
    uint64_t rank_rows_for(int to) const;

    // Slots that an expert-major receive tensor needs on the rank that needs most, zones padded to the alignment.
    uint64_t most_slots() const { return most_slots_; }

  private:
    size_t index(int from, int to) const {
        return static_cast<size_t>(from) * static_cast<size_t>(num_ranks_) + static_cast<size_t>(to);
    }

    int num_ranks_;
    int num_tokens_;
    std::vector<uint64_t> selections_;
    std::vector<uint64_t> rank_rows_;
    uint64_t most_slots_ = 0;
};

}  // namespace crossdock::bench
