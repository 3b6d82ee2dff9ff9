// SPDX-License-Identifier: Apache-2.0
// Where the ranks write what the report is made of: memory shared by the parent and all ranks, whatever the backend.
#pragma once

#include <atomic>
#include <cstdint>

#include "crossdock.h"
#include "demo/options.h"
#include "demo/text.h"
#include "tools/common/shared_array.h"

namespace crossdock::demo {

// The backward ones: high throughput only.
enum class Stage { kRoute, kDispatch, kExperts, kCombine, kBackwardDispatch, kBackwardExperts, kBackwardCombine };
inline constexpr int kNumForwardStages = 4;
inline constexpr int kNumStages = 7;

// Values beside those of the dense layer.
struct Comparison {
    uint64_t num_values = 0;
    uint64_t num_nonzero = 0;  // of them, not zero in the reference
    uint64_t num_above_bound = 0;
    double largest_error = 0;
    double bound_of_largest = 0;  // of the value with the largest error
    double largest_part = 0;      // of a value's own bound

    void add(double value, double expected, double bound);
    void add(const Comparison& other);
    bool passed() const { return num_values > 0 && num_nonzero > 0 && num_above_bound == 0; }
};

// What one rank writes about itself.
struct RankReport {
    std::atomic<int> steps_done;
    std::atomic<int> experts_checked;
    Comparison outputs;
    Comparison token_gradients;  // high throughput
    Comparison weight_gradients;
    double reference_s;
    crossdockTraffic_t traffic;  // over several nodes
};

struct StageTimes {
    double seconds[kNumStages];
};

class Board {
  public:
    Board(const Options& options, size_t num_tokens, int num_steps)
        : num_steps(num_steps),
          reports(static_cast<size_t>(options.num_ranks)),
          times(static_cast<size_t>(num_steps) * static_cast<size_t>(options.num_ranks)),
          routing(num_tokens * static_cast<size_t>(options.layer.topk)),
          rows_received(static_cast<size_t>(num_steps) * static_cast<size_t>(options.layer.num_experts)) {}

    StageTimes& stage_times(int step, int rank) {
        return times[static_cast<size_t>(step) * reports.size() + static_cast<size_t>(rank)];
    }

    const int num_steps;
    tools::SharedArray<RankReport> reports;     // [ranks]
    tools::SharedArray<StageTimes> times;       // [steps][ranks]
    tools::SharedArray<int32_t> routing;        // [tokens of the text][topk]: chosen experts, written by a token's rank
    tools::SharedArray<int32_t> rows_received;  // [steps][experts]: expert_counters as dispatch wrote them
};

// The part of the text that a rank takes in a step: token_idx first .. first + count - 1. Ranks take turns, so that
// every step goes on where the one before ended.
struct Share {
    size_t first;
    size_t count;
};

inline Share share_of(const Options& options, size_t num_tokens, int step, int rank) {
    const auto per_rank = static_cast<size_t>(options.tokens_per_rank);
    const size_t first =
        (static_cast<size_t>(step) * static_cast<size_t>(options.num_ranks) + static_cast<size_t>(rank)) * per_rank;
    return first >= num_tokens ? Share{num_tokens, 0}
                               : Share{first, num_tokens - first < per_rank ? num_tokens - first : per_rank};
}

}  // namespace crossdock::demo
