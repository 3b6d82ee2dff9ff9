// SPDX-License-Identifier: Apache-2.0
// What a run amounts to, computed from what its ranks wrote on the board.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "demo/board.h"
#include "demo/options.h"
#include "demo/text.h"

namespace crossdock::demo {

// What the ranks of one node sent in all dispatches and combines.
struct NodeTotals {
    uint64_t rows_inside = 0;
    uint64_t bytes_inside = 0;
    uint64_t rows_crossed = 0;
    uint64_t bytes_crossed = 0;
    uint64_t puts = 0;
    uint64_t signals = 0;
};

struct RankTotals {
    uint64_t tokens = 0;
    uint64_t rows_out =
        0;  // rows that dispatch carried from here, to all ranks, this one included; combine brings them back
    uint64_t rows_in = 0;   // rows that dispatch brought here, as its counters say
    uint64_t own_rows = 0;  // of both: rows that stayed on this rank
};

struct Summary {
    uint64_t num_tokens = 0;
    uint64_t num_words = 0;  // different ones
    uint64_t row_bytes = 0;
    std::vector<RankTotals> ranks;
    std::vector<uint64_t> traffic;      // [from][to] rows
    std::vector<NodeTotals> nodes;      // where there are several
    std::vector<uint64_t> expert_rows;  // [experts]
    int busiest_expert = 0;
    std::vector<std::pair<std::string, uint64_t>> busiest_words;  // most frequent first, at most 8
    std::vector<StageTimes> step_times;                           // [steps], of the slowest rank in each stage
    Comparison outputs;
    bool has_backward = false;
    Comparison token_gradients;
    Comparison weight_gradients;
    double reference_s = 0;     // of the slowest rank
    bool counts_agree = false;  // every expert received exactly the rows that were routed to it, in every step
    double total_s = 0;
    std::vector<std::string> failures;  // messages of ranks that did not end well; the rest is then incomplete

    bool passed() const {
        return failures.empty() && counts_agree && outputs.passed() &&
               (!has_backward || (token_gradients.passed() && weight_gradients.passed()));
    }
};

Summary summarise(const Options& options, const Text& text, size_t num_tokens, Board& board);

}  // namespace crossdock::demo
