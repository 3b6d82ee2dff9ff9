// SPDX-License-Identifier: Apache-2.0
// crossdock.h: routing in numbers, and labels of rows.
#include "core/labels.h"

#include "api/boundary.h"

ncclResult_t crossdockCountRouting(const crossdockRoutingCounts_t* counts, cudaStream_t stream) {
    return crossdock::boundary([&] { crossdock::count_routing(counts, stream); });
}

ncclResult_t crossdockPackLabels(const crossdockLabelsSent_t* labels, cudaStream_t stream) {
    return crossdock::boundary([&] { crossdock::pack_labels(labels, stream); });
}

ncclResult_t crossdockUnpackLabels(const crossdockLabelsReceived_t* labels, cudaStream_t stream) {
    return crossdock::boundary([&] { crossdock::unpack_labels(labels, stream); });
}
