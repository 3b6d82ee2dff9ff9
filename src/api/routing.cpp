// SPDX-License-Identifier: Apache-2.0
// crossdock.h: routing counts.
#include "core/routing.h"

#include "core/boundary.h"

ncclResult_t crossdockCountRouting(const crossdockRoutingCounts_t* counts, cudaStream_t stream) {
    return crossdock::boundary([&] { crossdock::count_routing(counts, stream); });
}
