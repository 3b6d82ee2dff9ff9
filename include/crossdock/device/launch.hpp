// SPDX-License-Identifier: Apache-2.0
// crossdockLaunch: a plain launch under nvcc; under g++ the kernel runs in the caller's thread, on the communicator's
// executor, and has ended when the call returns. Then what went wrong in it is the result, with a message for
// crossdockGetLastError. Blocks have at most 1024 threads, each with a stack of CROSSDOCK_GIN_STACK_KIB (1024). A
// thread that needs more ends the process by SIGSEGV, after a message that names it.
#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

#if defined(__CUDACC__)

template <typename... Parameters, typename... Arguments>
ncclResult_t crossdockLaunch(ncclComm_t, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                             void (*kernel)(Parameters...), Arguments&&... arguments) {
    kernel<<<grid, block, shared_bytes, stream>>>(static_cast<Parameters>(std::forward<Arguments>(arguments))...);
    return cudaGetLastError() == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

#else

#include <cstdlib>

#include "crossdock/device/words.hpp"

template <typename... Parameters, typename... Arguments>
ncclResult_t crossdockLaunch(ncclComm_t comm, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t,
                             void (*kernel)(Parameters...), Arguments&&... arguments) {
    struct Call {
        void (*kernel)(Parameters...);
        std::tuple<std::decay_t<Parameters>...> arguments;
    } call{kernel, {static_cast<Parameters>(std::forward<Arguments>(arguments))...}};
    crossdockLaunchArguments launch = {};
    launch.grid[0] = grid.x, launch.grid[1] = grid.y, launch.grid[2] = grid.z;
    launch.block[0] = block.x, launch.block[1] = block.y, launch.block[2] = block.z;
    launch.dynamic_shared_bytes = shared_bytes;
    launch.static_shared_bytes = crossdock::device::static_shared_bytes();
    launch.enter = &crossdock::device::enter;
    launch.context = &call;
    launch.body = [](void* context) {
        auto& its_call = *static_cast<Call*>(context);
        std::apply(its_call.kernel, its_call.arguments);
    };
    return crossdockLaunchKernel(comm, &launch);
}

// As much of the CUDA runtime as a program needs that launches kernels: device memory is memory, and a launch has
// ended when it returns.
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
inline cudaError_t cudaMalloc(void** memory, size_t bytes) {
    *memory = std::calloc(1, bytes == 0 ? 1 : bytes);
    return *memory == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
inline cudaError_t cudaFree(void* memory) {
    std::free(memory);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
    if (bytes > 0) std::memmove(target, source, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
    if (bytes > 0) std::memset(memory, value, bytes);
    return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

#endif
