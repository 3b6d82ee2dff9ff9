// SPDX-License-Identifier: Apache-2.0
// The GPU's entry points of routing, labels, and rows by expert.
#include <cuda_runtime.h>

#include "kernels/labels/count.h"
#include "kernels/labels/expand.h"
#include "kernels/labels/launch.h"
#include "kernels/labels/pack.h"
#include "kernels/labels/place.h"
#include "kernels/labels/reduce.h"
#include "kernels/labels/unpack.h"
#include "runtime/cuda/launch.cuh"

namespace crossdock::cuda {
namespace {

constexpr int kMostThreads = 512;
constexpr int kMostPlacingThreads = 1024;

__global__ void __launch_bounds__(kMostThreads, 1)
    crossdock_count_routing(const __grid_constant__ crossdockRoutingCounts_t counts) {
    count_routing(Ctx{}, counts);
}

__global__ void __launch_bounds__(kMostThreads, 1)
    crossdock_pack_labels(const __grid_constant__ crossdockLabelsSent_t labels) {
    pack_labels(Ctx{}, labels);
}

__global__ void __launch_bounds__(kMostThreads, 1)
    crossdock_unpack_labels(const __grid_constant__ crossdockLabelsReceived_t labels) {
    unpack_labels(Ctx{}, labels);
}

__global__ void __launch_bounds__(kMostPlacingThreads, 1)
    crossdock_place_rows(const __grid_constant__ crossdockRowPlaces_t places) {
    place_rows(Ctx{}, places);
}

__global__ void __launch_bounds__(kMostThreads, 1)
    crossdock_expand_rows(const __grid_constant__ crossdockExpandedRows_t rows) {
    expand_rows(Ctx{}, rows);
}

__global__ void __launch_bounds__(kMostThreads, 1)
    crossdock_reduce_rows(const __grid_constant__ crossdockReducedRows_t rows) {
    reduce_rows(Ctx{}, rows);
}

}  // namespace

void launch_count_routing(const crossdockRoutingCounts_t& counts, const LaunchShape& shape, cudaStream_t stream) {
    launch<crossdock_count_routing>(counts, shape, stream, "count routing");
}

void launch_pack_labels(const crossdockLabelsSent_t& labels, const LaunchShape& shape, cudaStream_t stream) {
    launch<crossdock_pack_labels>(labels, shape, stream, "pack labels");
}

void launch_unpack_labels(const crossdockLabelsReceived_t& labels, const LaunchShape& shape, cudaStream_t stream) {
    launch<crossdock_unpack_labels>(labels, shape, stream, "unpack labels");
}

void launch_place_rows(const crossdockRowPlaces_t& places, const LaunchShape& shape, cudaStream_t stream) {
    launch<crossdock_place_rows>(places, shape, stream, "place rows");
}

void launch_expand_rows(const crossdockExpandedRows_t& rows, const LaunchShape& shape, cudaStream_t stream) {
    launch<crossdock_expand_rows>(rows, shape, stream, "expand rows");
}

void launch_reduce_rows(const crossdockReducedRows_t& rows, const LaunchShape& shape, cudaStream_t stream) {
    launch<crossdock_reduce_rows>(rows, shape, stream, "reduce rows");
}

}  // namespace crossdock::cuda
