// SPDX-License-Identifier: Apache-2.0
// The two compilers of the kernels: nvcc (a warp is 32 lanes) and the host compiler (a warp is one fiber, one lane).
// Either compiles kernels that reach other ranks twice: for groups of one LSA team, and with CROSSDOCK_GIN_PEERS for
// groups that also have GIN peers. The former contain nothing of the latter.
//
// So one function of a kernel is compiled up to four times for one library, each time to other code. All that uses a
// Ctx or a constant of this file is therefore in unnamed namespaces, in headers too: each translation unit has its own.
// What has kPeers as a template parameter may be outside. (With kPeers as a parameter of Ctx, each of these functions
// would have to be a template.)
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define CROSSDOCK_DEVICE __device__ __forceinline__
#define CROSSDOCK_HOST_DEVICE __host__ __device__ __forceinline__
#define CROSSDOCK_DEVICE_RARE \
    inline __device__ __noinline__            // off the short path: kept out of the code that runs every time
#define CROSSDOCK_UNROLL _Pragma("unroll")    // so that a small array stays in registers
#define CROSSDOCK_ROLLED _Pragma("unroll 1")  // a kernel that runs some microseconds waits for every line of its code
#else
#define CROSSDOCK_DEVICE inline
#define CROSSDOCK_HOST_DEVICE inline
#define CROSSDOCK_DEVICE_RARE inline
#define CROSSDOCK_UNROLL
#define CROSSDOCK_ROLLED
#endif

namespace crossdock {

// Whom a kernel can reach: a parameter of its launch (runtime/launch.h), and of its entry point on GPUs, where
// profilers and resources.txt show it.
enum class Peers : uint32_t { kLsa, kLsaAndGin };

namespace {

#if defined(__CUDACC__)
constexpr int kLanes = 32;
#else
constexpr int kLanes = 1;
#endif

#if defined(CROSSDOCK_GIN_PEERS)
constexpr Peers kPeers = Peers::kLsaAndGin;
#else
constexpr Peers kPeers = Peers::kLsa;
#endif
constexpr bool kHasGinPeers = kPeers == Peers::kLsaAndGin;

// Kernels that know some of their arguments at compile time are the general one's source with constants. Sanitizer
// builds compile only the general kernel: the others would take most of the time.
#if defined(CROSSDOCK_GENERAL_KERNELS)
constexpr bool kHasKnownKernels = false;
#else
constexpr bool kHasKnownKernels = !kHasGinPeers;
#endif

}  // namespace
}  // namespace crossdock
