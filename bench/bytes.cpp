// SPDX-License-Identifier: Apache-2.0
#include "bench/bytes.h"

#include "bench/rows.h"

namespace crossdock::bench {
namespace {

// Every rank must know which experts all tokens have chosen. An id in 4 bytes.
OperationBytes update_bytes(const Options& options, const Traffic& traffic, int rank) {
    const auto own = static_cast<uint64_t>(traffic.num_tokens()) * static_cast<uint64_t>(options.topk) * 4;
    OperationBytes bytes;
    bytes.delivered = static_cast<double>(own * static_cast<uint64_t>(options.num_ranks));
    bytes.wire = static_cast<double>(own * static_cast<uint64_t>(options.num_ranks - 1));
    bytes.wire_to.resize(static_cast<size_t>(options.num_ranks), own);
    bytes.wire_to[static_cast<size_t>(rank)] = 0;
    return bytes;
}

// That definition of high throughput counts a token once per host, so its figures say nothing here.
double v1_bytes(const Options& options, const Traffic& traffic, int rank) {
    return options.is_high_throughput() ? 0 : static_cast<double>(traffic.selections_of(rank)) * options.hidden * 2;
}

OperationBytes dispatch_bytes(const Options& options, const Traffic& traffic, int rank) {
    const uint64_t row =
        static_cast<uint64_t>(options.hidden) * output_element_bytes(options) + num_scales(options) * sizeof(float);
    OperationBytes bytes;
    bytes.delivered = static_cast<double>(
        (options.is_expert_major() ? traffic.selections_for(rank) : traffic.rank_rows_for(rank)) * row);
    bytes.v1 = v1_bytes(options, traffic, rank);
    bytes.v2 = static_cast<double>(traffic.rank_rows_of(rank) * row);
    for (int to = 0; to < options.num_ranks; ++to) {
        bytes.wire_to.push_back(traffic.rank_rows(rank, to) * row);
        bytes.wire += to == rank ? 0.0 : static_cast<double>(bytes.wire_to.back());
    }
    return bytes;
}

// Rows travel the way back: what leaves a rank are the rows of other ranks' tokens. Exact sums need the rows of all
// choices at the source rank; else a rank sums a token's rows first.
OperationBytes combine_bytes(const Options& options, const Traffic& traffic, int rank) {
    const bool all_rows_travel = options.is_expert_major() && !options.sender_sums;
    const auto elements = static_cast<uint64_t>(options.hidden);
    const uint64_t row = elements * combine_element_bytes(options);
    const CombineRecipe& recipe = recipe_of(options.combine_recipe);
    const uint64_t wire_row = recipe.quantises() ? elements / recipe.row_multiple * recipe.wire_bytes : row;
    const uint64_t summed = options.is_expert_major() ? traffic.selections_of(rank) : traffic.rank_rows_of(rank);
    OperationBytes bytes;
    bytes.delivered = static_cast<double>(summed * row);
    bytes.v1 = v1_bytes(options, traffic, rank);
    bytes.v2 = options.is_high_throughput() ? static_cast<double>(traffic.rank_rows_of(rank) * row) : bytes.delivered;
    for (int source = 0; source < options.num_ranks; ++source) {
        const uint64_t rows = all_rows_travel ? traffic.selections(source, rank) : traffic.rank_rows(source, rank);
        bytes.wire_to.push_back(rows * wire_row);
        bytes.wire += source == rank ? 0.0 : static_cast<double>(bytes.wire_to.back());
    }
    return bytes;
}

}  // namespace

OperationBytes& OperationBytes::operator+=(const OperationBytes& other) {
    delivered += other.delivered;
    wire += other.wire;
    v1 += other.v1;
    v2 += other.v2;
    for (size_t rank = 0; rank < wire_to.size(); ++rank) {
        wire_to[rank] += other.wire_to[rank];
    }
    return *this;
}

OperationBytes count_bytes(const Options& options, const Traffic& traffic, int rank, Operation operation) {
    switch (operation) {
        case Operation::kUpdate:
            return update_bytes(options, traffic, rank);
        case Operation::kDispatch:
            return dispatch_bytes(options, traffic, rank);
        case Operation::kCombine:
            return combine_bytes(options, traffic, rank);
        case Operation::kPair: {
            OperationBytes bytes = dispatch_bytes(options, traffic, rank);
            bytes += combine_bytes(options, traffic, rank);
            return bytes;
        }
    }
    return {};
}

OperationBytes mean_bytes(const Options& options, const Traffic& traffic, Operation operation) {
    OperationBytes mean;
    for (int rank = 0; rank < options.num_ranks; ++rank) {
        mean += count_bytes(options, traffic, rank, operation);
    }
    const double num_ranks = options.num_ranks;
    mean.delivered /= num_ranks;
    mean.wire /= num_ranks;
    mean.v1 /= num_ranks;
    mean.v2 /= num_ranks;
    return mean;
}

}  // namespace crossdock::bench
