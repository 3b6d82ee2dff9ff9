// SPDX-License-Identifier: Apache-2.0
// Low-latency dispatch in plain loops: which rows a rank receives, in which order, and what each looks like.
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

// Rank-major: the ids that rank `target` gets for a row, [K]: of the choices hosted there, else -1.
std::vector<int32_t> arrived_ids(const Problem& problem, int target, RowSource row);

// Where scale `block` of slot `slot` of a block of the receive tensor lies, in elements from the start of that block of
// the tensor.
size_t scale_index(const Problem& problem, int slot, size_t block);

}  // namespace crossdock::reference
