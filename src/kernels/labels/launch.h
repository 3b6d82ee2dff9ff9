// SPDX-License-Identifier: Apache-2.0
// Launches the kernels of routing, labels, and rows by expert, on the GPU that their arguments name, or on the calling
// thread.
#pragma once

#include "crossdock.h"
#include "runtime/runtime.h"

namespace crossdock {

// Error where the launch fails.
void launch_count_routing(const crossdockRoutingCounts_t& counts, cudaStream_t stream);
void launch_pack_labels(const crossdockLabelsSent_t& labels, cudaStream_t stream);
void launch_unpack_labels(const crossdockLabelsReceived_t& labels, cudaStream_t stream);
void launch_place_rows(const crossdockRowPlaces_t& places, cudaStream_t stream);
void launch_expand_rows(const crossdockExpandedRows_t& rows, cudaStream_t stream);
void launch_reduce_rows(const crossdockReducedRows_t& rows, cudaStream_t stream);

namespace cuda {
void launch_count_routing(const crossdockRoutingCounts_t& counts, const LaunchShape& shape, cudaStream_t stream);
void launch_pack_labels(const crossdockLabelsSent_t& labels, const LaunchShape& shape, cudaStream_t stream);
void launch_unpack_labels(const crossdockLabelsReceived_t& labels, const LaunchShape& shape, cudaStream_t stream);
void launch_place_rows(const crossdockRowPlaces_t& places, const LaunchShape& shape, cudaStream_t stream);
void launch_expand_rows(const crossdockExpandedRows_t& rows, const LaunchShape& shape, cudaStream_t stream);
void launch_reduce_rows(const crossdockReducedRows_t& rows, const LaunchShape& shape, cudaStream_t stream);
}  // namespace cuda

}  // namespace crossdock
