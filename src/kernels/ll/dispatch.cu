// SPDX-License-Identifier: Apache-2.0
// The GPU's entry points of the low-latency dispatch. One launch per operation (variants.h chooses its kernel), whose
// name contains the operation's, for profilers. Compiled twice (platform.h: Peers).
#include <cuda_runtime.h>

#include "kernels/ll/dispatch_receive.h"
#include "kernels/ll/launch.h"
#include "kernels/ll/variants.h"
#include "runtime/cuda/launch.cuh"
#if defined(CROSSDOCK_TIMELINE) && !defined(CROSSDOCK_GIN_PEERS)
#include "kernels/ll/timeline_file.cuh"
#endif

namespace crossdock {
namespace {

template <typename Args, Peers>
__global__ void __launch_bounds__(kMostLlThreads, 1) crossdock_ll_dispatch(const __grid_constant__ Args args) {
    ll_dispatch(Ctx{}, args);
}

}  // namespace

static void launch_on_gpu(LlDispatch, const LlDispatchArgs& args, const LaunchShape& shape, cudaStream_t stream) {
    with_dispatch_variant(args, [&]<typename Args>(const Args& known) {
        cuda::launch<crossdock_ll_dispatch<Args, kPeers>>(known, shape, stream, LlDispatch::kName);
    });
}

template struct OnGpu<LlDispatch, kPeers>;

#if defined(CROSSDOCK_TIMELINE) && !defined(CROSSDOCK_GIN_PEERS)
void cuda::write_dispatch_times(int rank) {
    write_steps(rank, "dispatch", Step::kDispatchBegin, kDispatchSteps, std::ios::out);
}
#endif

}  // namespace crossdock
