// SPDX-License-Identifier: Apache-2.0
// Problems and routings made from a seed, spread over everything that a mode accepts.
#pragma once

#include <random>
#include <vector>

#include "reference/problem.h"
#include "src/core/recipes.h"

namespace crossdock::testing {

using reference::Problem;

// Fixed over platforms, unlike the distributions of the standard library.
class Random {
  public:
    explicit Random(uint64_t seed) : seed_(seed) {}
    uint64_t bits() { return reference::random_bits(seed_, next_++); }
    // 0 .. bound-1
    int below(int bound) { return static_cast<int>(bits() % static_cast<uint64_t>(bound)); }
    int between(int least, int most) { return least + below(most - least + 1); }
    bool chance(int percent) { return below(100) < percent; }
    double unit() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
    template <typename Value>
    Value pick(std::initializer_list<Value> values) {
        return values.begin()[below(static_cast<int>(values.size()))];
    }

  private:
    uint64_t seed_;
    uint64_t next_ = 0;
};

inline constexpr ncclEpAlgorithm_t kLowLatency = NCCL_EP_ALGO_LOW_LATENCY;
inline constexpr ncclEpAlgorithm_t kHighThroughput = NCCL_EP_ALGO_HIGH_THROUGHPUT;

// How the receive budget is chosen: enough for every routing, often too small (and drops), or none.
enum class Room { kAny, kEnough, kDropping, kEager };

struct ProblemLimits {
    ncclEpAlgorithm_t algorithm = kLowLatency;
    int num_ranks = 2;
    int local_experts = 0;  // 0: any number
    size_t most_row_bytes = algorithm == kLowLatency ? 4096 : 2048;
    size_t most_receive_bytes = algorithm == kLowLatency ? 8u << 20 : 256u << 10;  // of one rank's receive tensor
    int most_tokens = 24;
    Room room = Room::kAny;  // high throughput
    // NVFP4 needs GPUs that convert to 4 bits, MXFP8 one LSA team.
    bool quantised_combines = algorithm == kLowLatency;
    bool scales = true;             // low latency
    bool invariant_groups = false;  // some of those that can be
};

Problem random_problem(uint64_t seed, const ProblemLimits& limits);

// Whether an invariant group can have such handles and combines.
bool can_be_invariant(const Problem& problem);

// New routing, numbers of tokens and data for the same shapes. keep_counts: as many tokens on each rank as before.
Problem rerouted(const Problem& problem, uint64_t seed, bool keep_counts = false);

// High throughput: a budget for the problem.
void choose_budget(Problem& problem, Room room, uint64_t seed);

// Sets the mode. High throughput gets zones of 4 rows in the expert-major layout, and room for every routing.
void set_mode(Problem& problem, ncclEpAlgorithm_t algorithm);

// A problem of fixed shape: 3 experts per rank, top-3, 9 tokens, rows of 256 bytes; high throughput as set_mode says.
Problem plain_problem(int num_ranks, ncclEpLayout_t layout, uint64_t seed, ncclEpAlgorithm_t algorithm = kLowLatency);

// Room for the windows of the layers of high-throughput problems.
inline constexpr size_t kHtWindowBytes = 32u << 20;

// The layouts of each mode: src/core/layouts.h.
extern const std::vector<ncclEpLayout_t> kLlLayouts;
extern const std::vector<ncclEpLayout_t> kHtLayouts;
inline const auto& layouts_of(ncclEpAlgorithm_t mode) { return mode == kLowLatency ? kLlLayouts : kHtLayouts; }

// The dispatch recipes of low latency that quantise rows on their way, and the combine recipes of a mode and a layout
// that do: src/core/recipes.h.
std::vector<DispatchRecipe> quantising_dispatches();
std::vector<CombineRecipe> quantising_combines(ncclEpAlgorithm_t mode, bool is_expert_major);

}  // namespace crossdock::testing
