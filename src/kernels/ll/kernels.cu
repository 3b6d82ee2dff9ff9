// SPDX-License-Identifier: Apache-2.0
// The GPU's entry points of the low-latency kernels. One kernel an operation, whose name carries the word by which
// profilers find it.
#include <cuda_runtime.h>

#include "kernels/ll/combine.h"
#include "kernels/ll/dispatch.h"
#include "kernels/ll/launch.h"

namespace crossdock::cuda {
namespace {

constexpr int kMostThreads = 512;

__global__ void __launch_bounds__(kMostThreads, 1) crossdock_ll_dispatch(const __grid_constant__ LlDispatchArgs args) { ll_dispatch(Ctx{}, args); }

template <DType kDType>
__global__ void __launch_bounds__(kMostThreads, 1) crossdock_ll_combine(const __grid_constant__ LlCombineArgs args) {
    ll_combine<kDType>(Ctx{}, args);
}

__global__ void crossdock_ll_mask_clean(const __grid_constant__ LlMaskCleanArgs args) { ll_mask_clean(Ctx{}, args); }

template <typename Args>
void launch(void (*kernel)(Args), const Args& args, const LaunchShape& shape, cudaStream_t stream, const char* name) {
    const int shared_bytes = static_cast<int>(shape.shared_bytes);
    cudaError_t result = cudaSuccess;
    if (shared_bytes > 48 * 1024) {
        result = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    }
    if (result == cudaSuccess) {
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(static_cast<unsigned>(shape.num_blocks));
        config.blockDim = dim3(static_cast<unsigned>(shape.warps_per_block * kLanes));
        config.dynamicSmemBytes = shape.shared_bytes;
        config.stream = stream;
        result = cudaLaunchKernelEx(&config, kernel, args);
    }
    if (result != cudaSuccess) {
        const cudaError_t cleared = cudaGetLastError();
        static_cast<void>(cleared);
        fail_launch(name, shape, cudaGetErrorString(result));
    }
}

}  // namespace

void launch_ll_dispatch(const LlDispatchArgs& args, LaunchShape shape, cudaStream_t stream) {
    launch(crossdock_ll_dispatch, args, shape, stream, "LL dispatch");
}

void launch_ll_combine(const LlCombineArgs& args, LaunchShape shape, cudaStream_t stream) {
    switch (args.dtype) {
        case DType::kBf16:
            return launch(crossdock_ll_combine<DType::kBf16>, args, shape, stream, "LL combine");
        case DType::kF16:
            return launch(crossdock_ll_combine<DType::kF16>, args, shape, stream, "LL combine");
        case DType::kF32:
            return launch(crossdock_ll_combine<DType::kF32>, args, shape, stream, "LL combine");
    }
}

void launch_ll_mask_clean(const LlMaskCleanArgs& args, LaunchShape shape, cudaStream_t stream) {
    launch(crossdock_ll_mask_clean, args, shape, stream, "mask clean");
}

}  // namespace crossdock::cuda
