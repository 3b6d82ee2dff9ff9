// SPDX-License-Identifier: Apache-2.0
// crossdock.h: routing counts, packed routing, and rows by expert.
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

ncclResult_t crossdockPlaceRows(const crossdockRowPlaces_t* places, cudaStream_t stream) {
    return crossdock::boundary([&] { crossdock::place_rows(places, stream); });
}

ncclResult_t crossdockExpandRows(const crossdockExpandedRows_t* rows, cudaStream_t stream) {
    return crossdock::boundary([&] { crossdock::expand_rows(rows, stream); });
}

ncclResult_t crossdockReduceRows(const crossdockReducedRows_t* rows, cudaStream_t stream) {
    return crossdock::boundary([&] { crossdock::reduce_rows(rows, stream); });
}
