// SPDX-License-Identifier: Apache-2.0
// Problems and routings made from a seed, spread over everything that the low-latency mode accepts.
#pragma once

#include <random>

#include "reference/problem.h"

namespace crossdock::testing {

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

struct ProblemLimits {
    int num_ranks = 2;
    int local_experts = 0;  // 0: any number
    size_t most_row_bytes = 4096;
    size_t most_receive_bytes = 8u << 20;  // of one rank's receive tensor
    int most_tokens = 24;
    bool quantised_combines = true;  // false on GPUs: NVFP4 needs one that converts to 4 bits
    bool scales = true;
};

// The first draws of a random problem of either mode: experts, K and ids; expert-major or that layout. local_experts 0:
// any number.
reference::Problem random_shape(uint64_t seed, int num_ranks, int local_experts, ncclEpLayout_t other_layout,
                                Random& random);
// In units of 16 bytes: mostly few, some rows at the limit.
size_t random_row_units(size_t most_units, Random& random);

reference::Problem random_problem(uint64_t seed, const ProblemLimits& limits);

// New routing, numbers of tokens and data for the same shapes. keep_counts: as many tokens on each rank as before.
reference::Problem rerouted(const reference::Problem& problem, uint64_t seed, bool keep_counts = false);

// A problem of fixed shape: 3 experts per rank, top-3, 9 tokens, rows of 256 bytes.
reference::Problem plain_problem(int num_ranks, ncclEpLayout_t layout, uint64_t seed);

}  // namespace crossdock::testing
