// SPDX-License-Identifier: Apache-2.0
// What was measured; complete on rank 0 only.
#pragma once

#include <string>
#include <vector>

#include "bench/bytes.h"
#include "bench/options.h"
#include "bench/validate.h"
#include "bench/workload_memory.h"
#include "tools/common/statistics.h"

namespace crossdock::bench {

// Of one operation, or of its lower bound. Microseconds. A spread without samples was not measured.
struct Timing {
    tools::Spread time;     // latency. CPUs: first rank's start to last rank's end. GPUs: mean over ranks, by events
    tools::Spread slowest;  // GPUs: the slowest rank's
    tools::Spread device;   // GPUs: steady-state time per operation (CUDA graphs), the slowest rank's
    int graph_operations = 0;
    tools::Spread host;  // GPUs: what the call takes on the CPU, stream drained before it; all ranks' calls
};

// Of the kernels of one operation, us, mean over ranks; begun by all ranks at once.
struct KernelTiming {
    tools::Spread duration;  // their sum
    double num_kernels = 0;  // per operation
};

// A matrix product after another one, and between the halves of an operation, us, mean over ranks.
struct OverlapTiming {
    tools::Spread alone;
    tools::Spread between;
    tools::Spread send;  // the halves themselves
    tools::Spread complete;

    // The part by which the product takes longer between the halves.
    double loss() const { return between.median / alone.median - 1; }
};

struct LibraryResult {
    std::string name;
    int version = 0;
    size_t symmetric_bytes = 0;  // memory of the library; 0: it does not say
    size_t local_bytes = 0;
    size_t device_bytes = 0;  // GPUs: what group and handle took of the GPU's memory
    StartUp start_up;
    Validation validation;
    Timing timings[kNumOperations];
    KernelTiming kernels[kNumOperations];    // with --kernels
    OverlapTiming overlaps[kNumOperations];  // with --overlap; not of the pair
};

struct CaseResult {
    Options setting;
    int num_tokens = 0;
    OperationBytes bytes[kNumOperations];  // mean over ranks
    std::string lower_bound;               // its description
    Timing lower_bounds[kNumOperations];
    std::vector<LibraryResult> libraries;
};

// The time that a library is compared with its lower bound by: the device's if there is one.
inline const tools::Spread& compared(const Timing& timing) {
    return timing.device.count > 0 ? timing.device : timing.time;
}

}  // namespace crossdock::bench
