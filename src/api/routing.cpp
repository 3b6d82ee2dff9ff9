// SPDX-License-Identifier: Apache-2.0
// crossdock.h: routing counts and packed routing.
#include "core/routing.h"

#include "core/boundary.h"

ncclResult_t crossdockCountRouting(const crossdockRoutingCounts_t* counts, cudaStream_t stream) {
    return crossdock::boundary([&] { crossdock::count_routing(counts, stream); });
}

ncclResult_t crossdockPackRouting(const crossdockRoutingSent_t* routing, cudaStream_t stream) {
    return crossdock::boundary([&] { crossdock::pack_routing(routing, stream); });
}

ncclResult_t crossdockUnpackRouting(const crossdockRoutingReceived_t* routing, cudaStream_t stream) {
    return crossdock::boundary([&] { crossdock::unpack_routing(routing, stream); });
}

ncclResult_t crossdockPackLabels(const crossdockLabelsSent_t* routing, cudaStream_t stream) {
    return crossdockPackRouting(routing, stream);
}

ncclResult_t crossdockUnpackLabels(const crossdockLabelsReceived_t* routing, cudaStream_t stream) {
    return crossdockUnpackRouting(routing, stream);
}
