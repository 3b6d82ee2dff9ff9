// SPDX-License-Identifier: Apache-2.0
// How many bytes an operation moves, by each definition that is in use.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/options.h"

namespace crossdock::bench {

// Of one rank; self-traffic counts except in `wire`, headers and counters count nowhere.
struct OperationBytes {
    double delivered = 0;  // rows that the operation puts into tensors here (combine: rows that it sums) x row bytes
    double wire = 0;       // what has to leave this rank
    double v1 = 0;         // chosen experts x 2 bytes an element: NCCL EP 0.1's bandwidth definition
    double v2 = 0;         // rows as that library sends them x row bytes: NCCL EP 0.2's
    std::vector<uint64_t> wire_to;  // [ranks]

    OperationBytes& operator+=(const OperationBytes& other);
};

// routing: all ranks', [ranks][max_tokens][topk].
OperationBytes count_bytes(const Options& options, const std::vector<int32_t>& routing, int rank, int num_tokens,
                           Operation operation);

}  // namespace crossdock::bench
