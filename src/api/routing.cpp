// SPDX-License-Identifier: Apache-2.0
#include "api/routing.h"

#include "core/boundary.h"
#include "core/routing.h"

ncclResult_t crossdockCountRouting(const crossdockRoutingCounts_t* counts, cudaStream_t stream) {
    return crossdock::boundary([&] { crossdock::count_routing(counts, stream); });
}
