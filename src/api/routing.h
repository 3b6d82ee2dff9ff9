// SPDX-License-Identifier: Apache-2.0
// Counts of a routing in one kernel, for crossdock.deep_ep. The Python module is a file of its own, so the library
// exports this function; no installed header declares it, and it may change at any time.
#pragma once

#include "kernels/routing/arguments.h"

// Local, without a group; nothing is kept.
// counts->device: the GPU that all memory is on; the call is enqueued on its stream and capturable. -1: host memory;
// the call returns when it is done.
// InvalidArgument: a needed array is NULL, numbers do not divide each other, a type or device does not exist.
extern "C" __attribute__((visibility("default"))) ncclResult_t crossdockCountRouting(
    const crossdockRoutingCounts_t* counts, cudaStream_t stream);
