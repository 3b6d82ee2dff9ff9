// SPDX-License-Identifier: Apache-2.0
// The two compilers of the kernels: nvcc (a warp is 32 lanes) and the host compiler (a warp is one fiber, one lane).
// Both compile kernels that reach other ranks twice: for groups of one LSA team, and with CROSSDOCK_GIN_PEERS for
// groups that also have GIN peers. The former contain no code for GIN peers.
//
// So a library has up to four versions of each kernel function. Everything that uses a Ctx or a constant of this file
// is therefore in unnamed namespaces, in headers too, so that each translation unit has its own. Only templates over
// kPeers may be outside. (With kPeers as a parameter of Ctx, each of these functions would have to be a template.)
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define CROSSDOCK_DEVICE __device__ __forceinline__
#define CROSSDOCK_HOST_DEVICE __host__ __device__ __forceinline__
#define CROSSDOCK_DEVICE_RARE \
    inline __device__ __noinline__            // rarely called: kept out of the code that runs every time
#define CROSSDOCK_UNROLL _Pragma("unroll")    // so that a small array stays in registers
#define CROSSDOCK_ROLLED _Pragma("unroll 1")  // a kernel of a few microseconds waits for each line of its code
#else
#define CROSSDOCK_DEVICE inline
#define CROSSDOCK_HOST_DEVICE inline
#define CROSSDOCK_DEVICE_RARE inline
#define CROSSDOCK_UNROLL
#define CROSSDOCK_ROLLED
#endif

namespace crossdock {

// The first architecture, as __CUDA_ARCH__ counts, whose kernels are compiled with bulk copies and wait themselves for
// the kernels before them in their stream.
inline constexpr int kFirstWithBulkCopies = 900;

// The peers that a kernel can reach: a parameter of its launch (runtime/launch.h) and of its entry point on GPUs, so
// that profilers and resources.txt show it.
enum class Peers : uint32_t { kLsa, kLsaAndGin };

namespace {

#if defined(__CUDACC__)
constexpr uint32_t kLanes = 32;
#else
constexpr uint32_t kLanes = 1;
#endif

// What the architecture has. Only device code may depend on it: while nvcc compiles code for the host, it does not
// know.
#if defined(__CUDA_ARCH__)
constexpr int kArchitecture = __CUDA_ARCH__;
#else
constexpr int kArchitecture = 900;
#endif
// Bulk copies, whose bytes mbarriers count, and programmatic dependent launch.
constexpr bool kHasBulkCopies = kArchitecture >= kFirstWithBulkCopies;
constexpr bool kHasFp8Conversions = kArchitecture >= 890;

#if defined(CROSSDOCK_GIN_PEERS)
constexpr Peers kPeers = Peers::kLsaAndGin;
#else
constexpr Peers kPeers = Peers::kLsa;
#endif
constexpr bool kHasGinPeers = kPeers == Peers::kLsaAndGin;

// Kernels that know some arguments at compile time are the general kernel's source with constants. Sanitizer builds
// compile only the general kernel, and so do users' builds, of the kernels for CPUs: the others would take most of the
// build time.
#if defined(CROSSDOCK_GENERAL_KERNELS)
constexpr bool kHasKnownKernels = false;
#else
constexpr bool kHasKnownKernels = !kHasGinPeers;
#endif

}  // namespace
}  // namespace crossdock
