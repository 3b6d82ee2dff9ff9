// SPDX-License-Identifier: Apache-2.0
// The two compilers of the kernels: nvcc (a warp is 32 lanes) and the host compiler (a warp is one fiber, one lane).
// Either compiles kernels that reach other nodes a second time, with CROSSDOCK_SEVERAL_DOMAINS: where all ranks share
// one load/store domain, nothing of it is left in the code.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define CROSSDOCK_DEVICE __device__ __forceinline__
#define CROSSDOCK_HOST_DEVICE __host__ __device__ __forceinline__
#if defined(CROSSDOCK_SEVERAL_DOMAINS)
#define CROSSDOCK_WORLD gpu_nodes
#else
#define CROSSDOCK_WORLD gpu
#endif
#define CROSSDOCK_DEVICE_RARE \
    inline __device__ __noinline__            // off the short path: kept out of the code that runs every time
#define CROSSDOCK_UNROLL _Pragma("unroll")    // so that a small array stays in registers
#define CROSSDOCK_ROLLED _Pragma("unroll 1")  // a kernel that runs some microseconds waits for every line of its code
#else
#define CROSSDOCK_DEVICE inline
#define CROSSDOCK_HOST_DEVICE inline
#if defined(CROSSDOCK_SEVERAL_DOMAINS)
#define CROSSDOCK_WORLD cpu_nodes
#else
#define CROSSDOCK_WORLD cpu
#endif
#define CROSSDOCK_DEVICE_RARE inline
#define CROSSDOCK_UNROLL
#define CROSSDOCK_ROLLED
#endif

// Kernel code lives in crossdock::gpu or crossdock::cpu (or gpu_nodes, cpu_nodes), so that all builds of one source can
// be linked into one library.
namespace crossdock {
inline namespace CROSSDOCK_WORLD {

#if defined(__CUDACC__)
inline constexpr int kLanes = 32;
#else
inline constexpr int kLanes = 1;
#endif

#if defined(CROSSDOCK_SEVERAL_DOMAINS)
inline constexpr bool kSeveralDomains = true;
#else
inline constexpr bool kSeveralDomains = false;
#endif

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
