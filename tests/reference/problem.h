// SPDX-License-Identifier: Apache-2.0
// One MoE exchange of either mode, stated completely: shapes, routing of all ranks, and a pure function for every byte
// that any rank feeds in. Each rank of a test makes the same Problem from the same seed, so nobody has to send anybody
// what to expect.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "crossdock.h"

namespace crossdock::reference {

inline uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

// How wild the values of combine's rows are.
enum class Values { kModerate, kWide };

// This rank's part of the routing. ids and weights are [num_tokens, K].
struct RankInput {
    int num_tokens = 0;
    std::vector<int64_t> ids;
    std::vector<float> weights;
};

// The mode must have the layout and the recipes (core/layouts.h, core/recipes.h).
struct Problem {
    ncclEpAlgorithm_t algorithm = NCCL_EP_ALGO_LOW_LATENCY;
    uint64_t seed = 0;
    int num_ranks = 1;
    int num_experts = 1;
    int max_tokens = 1;
    int num_topk = 1;
    ncclEpLayout_t layout = NCCL_EP_LAYOUT_EXPERT_MAJOR;
    ncclDataType_t index_type = ncclInt64;

    ncclEpDispQuant_t recipe = NCCL_EP_DISP_QUANT_NONE;
    bool asks_as_v1 = false;  // for DS_FP8E3M4, as version 1 does: by a tensor for scales, without a recipe
    bool round_scales = false;
    ncclDataType_t token_type = ncclBfloat16;  // of dispatch's input
    size_t hidden = 8;                         // elements of an input row
    ncclDataType_t scale_type = ncclFloat32;
    size_t num_scales = 0;  // a row
    ncclEpExpertIdKind_t id_kind = NCCL_EP_EXPERT_ID_AUTO;

    ncclEpCombQuant_t combine_recipe = NCCL_EP_COMB_QUANT_NONE;
    ncclDataType_t combine_type = ncclBfloat16;
    size_t combine_hidden = 8;
    Values values = Values::kModerate;
    crossdockSums_t sums = CROSSDOCK_SUMS_EXACT;  // low latency

    // High throughput.
    size_t alignment = 1;    // of the experts' zones, in rows (expert-major)
    size_t budget = 0;       // rows that a rank can receive; 0: eager mode, where routing decides
    bool drops = false;      // rows past the budget are dropped, instead of failing the group
    int group_topk = 0;      // the group's num_topk; 0: unset
    bool invariant = false;  // of the group: sums in the order of choices (expert-major)

    std::vector<RankInput> ranks;

    bool is_ht() const { return algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT; }
    bool expert_major() const { return layout == NCCL_EP_LAYOUT_EXPERT_MAJOR; }
    bool has_scales() const { return recipe != NCCL_EP_DISP_QUANT_NONE; }
    int local_experts() const { return num_experts / num_ranks; }
    // Low latency: the receive tensors are [blocks, slots, ...].
    int num_blocks() const { return expert_major() ? local_experts() : num_ranks; }
    int slots() const { return expert_major() ? num_ranks * max_tokens : max_tokens; }
    // High throughput: as many rows as any routing can bring to a rank.
    size_t most_rows() const;
    // High throughput: the rows past which nothing is ever written: the budget, in eager mode the library's bound.
    size_t row_limit() const;

    ncclDataType_t received_type() const;
    size_t token_row_bytes() const;     // of dispatch's input
    size_t received_row_bytes() const;  // of dispatch's output
    size_t scale_row_bytes() const;
    size_t combine_row_bytes() const;
    size_t max_token_bytes() const;  // what the group must be told

    // The rank that hosts choice k of a token, or -1 for a dropped one.
    int target_rank(int source, int token, int k) const;
    int64_t expert(int source, int token, int k) const { return ranks[source].ids[token * num_topk + k]; }
    float weight(int source, int token, int k) const { return ranks[source].weights[token * num_topk + k]; }

    std::string describe() const;
};

// A row that travels: which token of which rank, and in the expert-major layout for which of its choices: k, or in high
// throughput the local expert. Other layouts: 0.
struct RowSource {
    int source = -1;
    int token = 0;
    int choice = 0;
    bool is_padding() const { return source < 0; }  // high throughput, expert-major
};

// Dispatch's input of one token: num_tokens rows of token_row_bytes, and of scale_row_bytes.
std::vector<std::byte> token_row(const Problem& problem, int source, int token);
std::vector<std::byte> scale_row(const Problem& problem, int source, int token);

// What the experts of rank `target` make of a row, in the forward and in the backward pass. Independent of what was
// dispatched, so that a mistake in dispatch cannot hide one in combine.
std::vector<std::byte> expert_row(const Problem& problem, int target, RowSource row);

// Of `count` reproducible numbers, number `index`.
inline uint64_t random_bits(uint64_t seed, uint64_t index) { return mix(seed + (index + 1) * 0x9E3779B97F4A7C15u); }

}  // namespace crossdock::reference
