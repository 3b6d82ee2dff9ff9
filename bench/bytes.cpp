// SPDX-License-Identifier: Apache-2.0
#include "bench/bytes.h"

#include "bench/routing.h"
#include "bench/rows.h"

namespace crossdock::bench {
namespace {

OperationBytes dispatch_bytes(const Options& options, const std::vector<int32_t>& routing, int rank, int num_tokens) {
    const RowCounts counts = count_rows(options, routing, rank, num_tokens);
    const uint64_t row =
        static_cast<uint64_t>(options.hidden) * output_element_bytes(options) + num_scales(options) * sizeof(float);
    OperationBytes bytes;
    bytes.delivered =
        static_cast<double>((options.is_expert_major() ? counts.selections_in : counts.rank_rows_in) * row);
    bytes.wire = static_cast<double>(counts.remote_rank_rows * row);
    bytes.v1 = static_cast<double>(counts.selections) * options.hidden * 2;
    bytes.v2 = static_cast<double>(counts.rank_rows * row);
    for (uint64_t rows : counts.rank_rows_to) {
        bytes.wire_to.push_back(rows * row);
    }
    return bytes;
}

// Rows travel the way back: what leaves a rank are the rows of other ranks' tokens.
OperationBytes combine_bytes(const Options& options, const std::vector<int32_t>& routing, int rank, int num_tokens) {
    const bool all_rows_travel = options.is_expert_major() && !options.sender_sums;
    const uint64_t row = static_cast<uint64_t>(options.hidden) * combine_element_bytes(options);
    const RowCounts counts = count_rows(options, routing, rank, num_tokens);
    OperationBytes bytes;
    bytes.delivered = static_cast<double>((options.is_expert_major() ? counts.selections : counts.rank_rows) * row);
    bytes.v1 = static_cast<double>(counts.selections) * options.hidden * 2;
    bytes.v2 = bytes.delivered;
    for (int home = 0; home < options.num_ranks; ++home) {
        const RowCounts theirs = home == rank ? counts : count_rows(options, routing, home, num_tokens);
        const auto& rows_to = all_rows_travel ? theirs.selections_to : theirs.rank_rows_to;
        bytes.wire_to.push_back(rows_to[static_cast<size_t>(rank)] * row);
        bytes.wire += home == rank ? 0.0 : static_cast<double>(bytes.wire_to.back());
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

OperationBytes count_bytes(const Options& options, const std::vector<int32_t>& routing, int rank, int num_tokens,
                           Operation operation) {
    switch (operation) {
        case Operation::kDispatch:
            return dispatch_bytes(options, routing, rank, num_tokens);
        case Operation::kCombine:
            return combine_bytes(options, routing, rank, num_tokens);
        case Operation::kPair: {
            OperationBytes bytes = dispatch_bytes(options, routing, rank, num_tokens);
            bytes += combine_bytes(options, routing, rank, num_tokens);
            return bytes;
        }
    }
    return {};
}

}  // namespace crossdock::bench
