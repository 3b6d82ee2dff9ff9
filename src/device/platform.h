// SPDX-License-Identifier: Apache-2.0
// The two compilers of the kernels: nvcc (a warp is 32 lanes) and the host compiler (a warp is one fiber, one lane).
// Either compiles kernels that reach other ranks twice: for groups of one LSA team, and with CROSSDOCK_GIN_PEERS for
// groups that also have GIN peers. The former contain nothing of the latter.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define CROSSDOCK_DEVICE __device__ __forceinline__
#define CROSSDOCK_HOST_DEVICE __host__ __device__ __forceinline__
#if defined(CROSSDOCK_GIN_PEERS)
#define CROSSDOCK_VARIANT gpu_gin
#else
#define CROSSDOCK_VARIANT gpu
#endif
#define CROSSDOCK_DEVICE_RARE \
    inline __device__ __noinline__            // off the short path: kept out of the code that runs every time
#define CROSSDOCK_UNROLL _Pragma("unroll")    // so that a small array stays in registers
#define CROSSDOCK_ROLLED _Pragma("unroll 1")  // a kernel that runs some microseconds waits for every line of its code
#else
#define CROSSDOCK_DEVICE inline
#define CROSSDOCK_HOST_DEVICE inline
#if defined(CROSSDOCK_GIN_PEERS)
#define CROSSDOCK_VARIANT cpu_gin
#else
#define CROSSDOCK_VARIANT cpu
#endif
#define CROSSDOCK_DEVICE_RARE inline
#define CROSSDOCK_UNROLL
#define CROSSDOCK_ROLLED
#endif

namespace crossdock {

// Whom a kernel can reach: a parameter of its launch (runtime/launch.h), and of its entry point on GPUs.
enum class Peers : uint32_t { kLsa, kLsaAndGin };

// The code of kernels lives in a namespace that differs with the compiler and kPeers, so all variants of one source can
// be linked into one library: their functions have the same names and parameters, and another meaning. (With kPeers as
// a parameter of Ctx instead, each of these functions would have to be a template.)
inline namespace CROSSDOCK_VARIANT {

#if defined(__CUDACC__)
inline constexpr int kLanes = 32;
#else
inline constexpr int kLanes = 1;
#endif

#if defined(CROSSDOCK_GIN_PEERS)
inline constexpr Peers kPeers = Peers::kLsaAndGin;
#else
inline constexpr Peers kPeers = Peers::kLsa;
#endif
inline constexpr bool kHasGinPeers = kPeers == Peers::kLsaAndGin;

}  // namespace CROSSDOCK_VARIANT
}  // namespace crossdock
