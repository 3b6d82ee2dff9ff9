// SPDX-License-Identifier: Apache-2.0
// High-throughput problems made from a seed, spread over everything that the mode accepts, and ways to state them.
#pragma once

#include "conformance/ht/layer.h"
#include "conformance/ll/random_problem.h"

namespace crossdock::testing {

// How the receive budget is chosen.
enum class Room { kAny, kEnough, kDropping, kEager };

struct HtLimits {
    int num_ranks = 2;
    int local_experts = 0;  // 0: any number
    size_t most_row_bytes = 2048;
    size_t most_receive_bytes = 256u << 10;  // of one rank's receive tensor
    int most_tokens = 24;
    Room room = Room::kAny;
    bool mxfp8 = false;  // expert-major combines may be quantised
};

HtProblem random_ht_problem(uint64_t seed, const HtLimits& limits);

// New routing, numbers of tokens and data for the same shapes. keep_counts: as many tokens on each rank as before.
HtProblem rerouted(const HtProblem& problem, uint64_t seed, bool keep_counts = false);

// A budget for the problem: enough for every routing, one that is often too small (and drops), or none.
void choose_budget(HtProblem& problem, Room room, uint64_t seed);

// Ways to state the calls. arena: where windows come from, if there are any.
HtOptions random_ht_options(uint64_t seed, WindowArena* arena);

// plain_problem with room for every routing.
HtProblem plain_ht_problem(int num_ranks, ncclEpLayout_t layout, uint64_t seed);

// Room for the windows of the layers of such problems.
inline constexpr size_t kHtWindowBytes = 32u << 20;

inline constexpr ncclEpLayout_t kHtLayouts[] = {NCCL_EP_LAYOUT_FLAT, NCCL_EP_LAYOUT_EXPERT_MAJOR};

}  // namespace crossdock::testing
