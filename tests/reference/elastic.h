// SPDX-License-Identifier: Apache-2.0
// Elastic operations (crossdock.h) in plain loops: which rows a rank receives, and what a token's rows add up to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "nccl_ep.h"

namespace crossdock::reference {

struct ElasticRouting {
    int num_ranks = 1;
    int local_experts = 1;
    int topk = 1;
    bool by_expert = false;
    uint32_t alignment = 1;                 // of an expert's rows and counts
    std::vector<std::vector<int64_t>> ids;  // of each rank: [tokens][topk], -1: none

    int num_tokens(int rank) const { return static_cast<int>(ids[rank].size()) / topk; }
    int64_t id(int rank, int token, int column) const { return ids[rank][token * topk + column]; }
    // The expert of a column as its rank numbers it; -1: of another rank, or none.
    int local_expert(int target, int rank, int token, int column) const;
};

// What comes to one rank.
struct ElasticArrivals {
    struct Token {
        int source = 0;
        int token = 0;
        std::vector<int> experts;           // by column: local ones, or -1
        std::vector<int> rows;              // by column: of the outputs, or -1
        std::vector<int> distinct() const;  // its rows, each once, in the order of columns
    };
    std::vector<Token> tokens;
    std::vector<int> starts;  // of experts' rows, by expert
    std::vector<int> counts;  // tokens of each expert
    std::vector<int> expert_ends;
    std::vector<int> rank_ends;
    int num_rows = 0;  // up to the last row of a token
    // The token number of a source's token; -1: it does not come.
    int find(int source, int token) const;
};
ElasticArrivals elastic_arrivals(const ElasticRouting& routing, int target);

// The output row of a combine, bit for bit. arrivals: of every rank. row_of(rank, row): what that rank returns. Ranks
// of other LSA teams of that many ranks are first added among themselves, and rounded.
std::vector<std::byte> elastic_sum(const ElasticRouting& routing, const std::vector<ElasticArrivals>& arrivals,
                                   int source, int token, ncclDataType_t type, size_t hidden,
                                   const std::vector<std::vector<std::byte>>& biases, int lsa_team_size,
                                   const std::function<std::vector<std::byte>(int rank, int row)>& row_of);
// The same in an invariant group, by expert.
std::vector<std::byte> elastic_sum_of_choices(const ElasticRouting& routing,
                                              const std::vector<ElasticArrivals>& arrivals, int source, int token,
                                              ncclDataType_t type, size_t hidden,
                                              const std::vector<std::vector<std::byte>>& biases,
                                              const std::function<std::vector<std::byte>(int rank, int row)>& row_of);

}  // namespace crossdock::reference
