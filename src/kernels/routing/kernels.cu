// SPDX-License-Identifier: Apache-2.0
// The GPU's entry points of routing counts and packed routing.
#include <cuda_runtime.h>

#include "kernels/routing/count.h"
#include "kernels/routing/launch.h"
#include "kernels/routing/pack.h"
#include "kernels/routing/unpack.h"
#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/launch.cuh"

namespace crossdock {
namespace {

constexpr int kMostThreads = 512;

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

template struct OnGpu<CountRouting, kPeers>;
template struct OnGpu<PackRouting, kPeers>;
template struct OnGpu<UnpackRouting, kPeers>;

}  // namespace crossdock
