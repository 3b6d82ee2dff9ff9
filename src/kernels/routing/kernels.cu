// SPDX-License-Identifier: Apache-2.0
// The GPU's entry point of routing counts.
#include <cuda_runtime.h>

#include "kernels/routing/count.h"
#include "kernels/routing/launch.h"
#include "runtime/cuda/cuda_check.h"
#include "runtime/cuda/launch.cuh"

namespace crossdock {
namespace {

constexpr int kMostThreads = 512;

__global__ void __launch_bounds__(kMostThreads, 1)
    crossdock_count_routing(const __grid_constant__ crossdockRoutingCounts_t counts) {
    count_routing(Ctx{}, counts);
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

template struct OnGpu<CountRouting, kPeers>;

}  // namespace crossdock
