// SPDX-License-Identifier: Apache-2.0
// For .cu files with kernels: launches a kernel on a stream.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "device/platform.h"
#include "runtime/cuda/kernel_list.h"
#include "runtime/launch.h"

namespace crossdock {

// Each such file defines launch_on_gpu(Kernel, args, shape, stream) for its kPeers, which chooses the variant and
// launches it. It is static, because argument-dependent lookup does not search unnamed namespaces.
template <typename Kernel, Peers kReached>
void OnGpu<Kernel, kReached>::launch(const typename Kernel::Args& args, const LaunchShape& shape, cudaStream_t stream) {
    launch_on_gpu(Kernel{}, args, shape, stream);
}

namespace cuda {

// Code that calls launch<kernel> instantiates this, which lists the kernel.
template <auto kKernel>
inline ListedKernel listed_kernel{reinterpret_cast<const void*>(kKernel)};

template <auto kKernel, typename Args>
requires std::is_same_v<decltype(kKernel), void (*)(Args)>
void launch(const Args& args, const LaunchShape& shape, cudaStream_t stream, const char* name) {
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.attrs = &overlap;
    config.numAttrs = shape.overlaps_previous ? 1 : 0;
    config.gridDim = dim3(static_cast<unsigned>(shape.unused_blocks + shape.num_blocks));
    config.blockDim = dim3(static_cast<unsigned>(shape.warps_per_block * kLanes));
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = stream;
    // CUDA's own template would copy the arguments once more.
    void* parameters[] = {const_cast<Args*>(&args)};
    const cudaError_t result = cudaLaunchKernelExC(&config, listed_kernel<kKernel>.function(), parameters);
    if (result == cudaSuccess) return;
    const cudaError_t cleared = cudaGetLastError();
    static_cast<void>(cleared);
    fail_launch(name, shape, result);
}

}  // namespace cuda
}  // namespace crossdock
