// SPDX-License-Identifier: Apache-2.0
// The two compilers of the kernels: nvcc (a warp is 32 lanes) and the host compiler (a warp is one fiber, one lane).
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define CROSSDOCK_DEVICE __device__ __forceinline__
#define CROSSDOCK_HOST_DEVICE __host__ __device__ __forceinline__
#define CROSSDOCK_WORLD gpu
#define CROSSDOCK_DEVICE_RARE \
    inline __device__ __noinline__            // off the short path: kept out of the code that runs every time
#define CROSSDOCK_UNROLL _Pragma("unroll")    // so that a small array stays in registers
#define CROSSDOCK_ROLLED _Pragma("unroll 1")  // a kernel that runs some microseconds waits for every line of its code
#else
#define CROSSDOCK_DEVICE inline
#define CROSSDOCK_HOST_DEVICE inline
#define CROSSDOCK_WORLD cpu
#define CROSSDOCK_DEVICE_RARE inline
#define CROSSDOCK_UNROLL
#define CROSSDOCK_ROLLED
#endif

// Kernel code lives in crossdock::gpu or crossdock::cpu, so that both builds of one source can be linked into one
// library.
namespace crossdock {
inline namespace CROSSDOCK_WORLD {

#if defined(__CUDACC__)
inline constexpr int kLanes = 32;
#else
inline constexpr int kLanes = 1;
#endif

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
