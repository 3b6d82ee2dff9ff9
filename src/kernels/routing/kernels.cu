// SPDX-License-Identifier: Apache-2.0
// The GPU's entry points of routing, routing weights and expert ids, and rows by expert.
#include <cuda_runtime.h>

#include "kernels/routing/count.h"
#include "kernels/routing/expand.h"
#include "kernels/routing/launch.h"
#include "kernels/routing/pack.h"
#include "kernels/routing/place.h"
#include "kernels/routing/reduce.h"
#include "kernels/routing/unpack.h"
#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/launch.cuh"

namespace crossdock {
namespace {

constexpr int kMostThreads = 512;
constexpr int kMostPlacingThreads = 1024;

__global__ void __launch_bounds__(kMostThreads, 1)
    crossdock_count_routing(const __grid_constant__ crossdockRoutingCounts_t counts) {
    count_routing(Ctx{}, counts);
}

__global__ void __launch_bounds__(kMostThreads, 1)
    crossdock_pack_routing(const __grid_constant__ crossdockRoutingSent_t routing) {
    pack_routing(Ctx{}, routing);
}

__global__ void __launch_bounds__(kMostThreads, 1)
    crossdock_unpack_routing(const __grid_constant__ crossdockRoutingReceived_t routing) {
    unpack_routing(Ctx{}, routing);
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

template <auto kKernel>
void launch_on_device(const auto& args, const LaunchShape& shape, cudaStream_t stream, const char* name) {
    const DeviceGuard guard(args.device);
    cuda::launch<kKernel>(args, shape, stream, name);
}

}  // namespace

static void launch_on_gpu(CountRouting, const crossdockRoutingCounts_t& args, const LaunchShape& shape,
                          cudaStream_t stream) {
    launch_on_device<crossdock_count_routing>(args, shape, stream, CountRouting::kName);
}

static void launch_on_gpu(PackRouting, const crossdockRoutingSent_t& args, const LaunchShape& shape,
                          cudaStream_t stream) {
    launch_on_device<crossdock_pack_routing>(args, shape, stream, PackRouting::kName);
}

static void launch_on_gpu(UnpackRouting, const crossdockRoutingReceived_t& args, const LaunchShape& shape,
                          cudaStream_t stream) {
    launch_on_device<crossdock_unpack_routing>(args, shape, stream, UnpackRouting::kName);
}

static void launch_on_gpu(PlaceRows, const crossdockRowPlaces_t& args, const LaunchShape& shape, cudaStream_t stream) {
    launch_on_device<crossdock_place_rows>(args, shape, stream, PlaceRows::kName);
}

static void launch_on_gpu(ExpandRows, const crossdockExpandedRows_t& args, const LaunchShape& shape,
                          cudaStream_t stream) {
    launch_on_device<crossdock_expand_rows>(args, shape, stream, ExpandRows::kName);
}

static void launch_on_gpu(ReduceRows, const crossdockReducedRows_t& args, const LaunchShape& shape,
                          cudaStream_t stream) {
    launch_on_device<crossdock_reduce_rows>(args, shape, stream, ReduceRows::kName);
}

template struct OnGpu<CountRouting, kPeers>;
template struct OnGpu<PackRouting, kPeers>;
template struct OnGpu<UnpackRouting, kPeers>;
template struct OnGpu<PlaceRows, kPeers>;
template struct OnGpu<ExpandRows, kPeers>;
template struct OnGpu<ReduceRows, kPeers>;

}  // namespace crossdock
