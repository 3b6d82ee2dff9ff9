// SPDX-License-Identifier: Apache-2.0
// How many bytes an operation moves, by each definition that is in use.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/options.h"
#include "bench/routing.h"

namespace crossdock::bench {

// Of one rank; self-traffic counts except in `wire`, headers and counters count nowhere.
struct OperationBytes {
    double delivered = 0;  // rows that the operation puts into tensors here (combine: rows that it sums) x row bytes;
                           // update: all ranks' expert ids
    double wire = 0;       // what has to leave this rank
    double v1 = 0;         // LL: chosen experts x 2 bytes per element: NCCL EP 0.1's bandwidth definition. HT: 0
    double v2 = 0;         // rows as that library sends them x row bytes: NCCL EP 0.2's. Update: 0
    std::vector<uint64_t> wire_to;  // [ranks]

    OperationBytes& operator+=(const OperationBytes& other);
};

OperationBytes count_bytes(const Options& options, const Traffic& traffic, int rank, Operation operation);

// Mean over ranks; wire_to is left empty.
OperationBytes mean_bytes(const Options& options, const Traffic& traffic, Operation operation);

}  // namespace crossdock::bench
