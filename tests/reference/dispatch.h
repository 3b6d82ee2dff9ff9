// SPDX-License-Identifier: Apache-2.0
// Dispatch in plain loops: what each row looks like, and which rows a rank receives in low latency, in which order.
// High throughput: ht_dispatch.h.
#pragma once

#include "recipes.h"

namespace crossdock::reference {

// Which ranks take part, in one rank's view; empty: all.
using ActiveRanks = std::vector<int>;
inline bool is_active(const ActiveRanks& active, int rank) { return active.empty() || active[rank] != 0; }

// The rows that `rank` receives, one list per block. Expert-major: a block is a local expert, its rows are every
// (source rank, token, k) with that expert, in this order. Rank-major: a block is a source rank, its rows are every
// token with an expert here, in order. A rank that is not active contributes nothing. An expert has slots for R * M
// rows; duplicates of one expert in a token can exceed them, and the rows past the last slot are dropped.
std::vector<std::vector<RowSource>> received_rows(const Problem& problem, int rank, const ActiveRanks& active = {});

// The choices of a token that find a slot at their expert, [K]; false also for dropped ids. All ranks are active.
std::vector<char> choices_with_slot(const Problem& problem, int source, int token);

// A row as it arrives: as it was sent, or quantised.
using ArrivedRow = QuantisedRow;
ArrivedRow arrived_row(const Problem& problem, RowSource row);

// What rank `target` gets to know of a row beside its bytes. Rank-major, [K] each: the ids of the choices hosted there,
// else -1, and all weights. FLAT, [K] each: the local experts in ascending order with their weights, then -1 and 0.
// Expert-major in high throughput: no ids and the expert's weight. A row without a source, such as padding: ids -1 and
// weights 0.
struct Metadata {
    std::vector<int64_t> ids;
    std::vector<float> weights;
};
Metadata metadata_of(const Problem& problem, int target, RowSource row);
// Weights of a row.
inline int num_weights(const Problem& problem) {
    return problem.is_ht() && problem.expert_major() ? 1 : problem.num_topk;
}

// The last choice of an expert by a row's token, whose weight counts in high throughput; -1: none.
int last_choice_of(const Problem& problem, RowSource row, int64_t expert);
// The experts of rank `target` to which a token goes, local and ascending.
std::vector<int> local_experts_of(const Problem& problem, int target, RowSource row);

// Where scale `block` of row `row` of the receive tensor lies, in elements from the tensor's start.
size_t scale_index(const Problem& problem, size_t row, size_t block);

}  // namespace crossdock::reference
