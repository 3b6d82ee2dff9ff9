// SPDX-License-Identifier: Apache-2.0
// CUDA's vocabulary for the host compiler: qualifiers of functions and variables, thread indices, barriers of a
// block, fences, time. Not the CUDA runtime.
//
// A kernel's thread is a fiber. It runs until it calls something that may wait, so a loop that waits must read what it
// waits for by an atomic access or a function of NCCL's API, or call __nanosleep; a loop over plain loads never ends.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "crossdock/device/entry.hpp"
#include "cuda.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __grid_constant__

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
    constexpr operator uint3() const { return {x, y, z}; }
};

inline thread_local uint3 threadIdx = {0, 0, 0};
inline thread_local uint3 blockIdx = {0, 0, 0};
inline thread_local dim3 blockDim = {};
inline thread_local dim3 gridDim = {};
inline constexpr int warpSize = 32;

#define CROSSDOCK_VECTOR2(type, name)       \
    struct alignas(2 * sizeof(type)) name { \
        type x, y;                          \
    };                                      \
    inline name make_##name(type x, type y) { return {x, y}; }
#define CROSSDOCK_VECTOR4(type, name)                                \
    struct alignas(sizeof(type) == 8 ? 16 : 4 * sizeof(type)) name { \
        type x, y, z, w;                                             \
    };                                                               \
    inline name make_##name(type x, type y, type z, type w) { return {x, y, z, w}; }
CROSSDOCK_VECTOR2(int, int2)
CROSSDOCK_VECTOR2(unsigned, uint2)
CROSSDOCK_VECTOR2(float, float2)
CROSSDOCK_VECTOR2(double, double2)
CROSSDOCK_VECTOR2(long long, longlong2)
CROSSDOCK_VECTOR2(unsigned long long, ulonglong2)
CROSSDOCK_VECTOR4(int, int4)
CROSSDOCK_VECTOR4(unsigned, uint4)
CROSSDOCK_VECTOR4(float, float4)
#undef CROSSDOCK_VECTOR2
#undef CROSSDOCK_VECTOR4

// All __shared__ variables of this program or library, once per thread of the process. GNU ld defines the names (lld
// does not for variables of threads).
extern "C" {
extern __thread std::byte __start_crossdock_shared[] __attribute__((visibility("hidden")));
extern __thread std::byte __stop_crossdock_shared[] __attribute__((visibility("hidden")));
}

namespace crossdock::device {

// In templates g++ does not place variables in a section, so their __shared__ variables would not be a block's own.
constexpr bool is_template(const char* function) {
    for (; *function != '\0'; ++function) {
        if (function[0] == ' ' && function[1] == '[') return true;
    }
    return false;
}

static thread_local std::byte anchor_of_shared __attribute__((section("crossdock_shared"), used)) = std::byte{0};

// Each address is computed alone: a linker cannot rewrite an instruction that subtracts two of them.
inline std::byte* shared_begin() {
    std::byte* volatile address = __start_crossdock_shared;
    return address;
}
inline std::byte* shared_end() {
    std::byte* volatile address = __stop_crossdock_shared;
    return address;
}
inline size_t static_shared_bytes() { return static_cast<size_t>(shared_end() - shared_begin()); }

inline thread_local const crossdockThread* running = nullptr;
// Whose __shared__ variables are in place.
inline thread_local std::byte* shared_in_place = nullptr;

// The library's notice that the code of another thread runs from here on.
inline void enter(const crossdockThread* thread) {
    running = thread;
    if (thread == nullptr) return;
    if (thread->static_shared != shared_in_place) {
        if (shared_in_place != nullptr) std::memcpy(shared_in_place, shared_begin(), static_shared_bytes());
        if (thread->static_shared != nullptr) {
            std::memcpy(shared_begin(), thread->static_shared, static_shared_bytes());
        }
        shared_in_place = thread->static_shared;
    }
    const auto& [x, y, z] = thread->thread_idx;
    threadIdx = {x, y, z};
    blockIdx = {thread->block_idx[0], thread->block_idx[1], thread->block_idx[2]};
    blockDim = dim3(thread->block_dim[0], thread->block_dim[1], thread->block_dim[2]);
    gridDim = dim3(thread->grid_dim[0], thread->grid_dim[1], thread->grid_dim[2]);
}

// The call of the function that has current() as a default argument.
struct Location {
    const char* file;
    unsigned line;
    static constexpr Location current(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE()) {
        return {file, line};
    }
};
constexpr crossdockWhere where(Location location) { return {location.file, location.line}; }

}  // namespace crossdock::device

// A variable of the block. Dynamic shared memory (extern __shared__) is CROSSDOCK_DYNAMIC_SHARED.
#if defined(__clang__)
#define __shared__ thread_local __attribute__((section("crossdock_shared")))
#else
#define __shared__                                                                                           \
    static_assert(!::crossdock::device::is_template(__PRETTY_FUNCTION__),                                    \
                  "a __shared__ variable in a template: with g++ use CROSSDOCK_DYNAMIC_SHARED, or clang++"); \
    thread_local __attribute__((section("crossdock_shared")))
#endif

inline void __syncthreads() { crossdockSyncBlock(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { crossdockSyncLanes(mask); }
inline void __barrier_sync_count(unsigned number, unsigned count) {
    crossdockSyncNamed(static_cast<int>(number), static_cast<int>(count));
}
inline void __threadfence_block() { crossdockFenceMemory(crossdockFenceBlock); }
inline void __threadfence() { crossdockFenceMemory(crossdockFenceDevice); }
inline void __threadfence_system() { crossdockFenceMemory(crossdockFenceSystem); }
inline void __nanosleep(unsigned nanoseconds) { crossdockPause(nanoseconds); }
// Nanoseconds, as if a GPU ran at 1 GHz.
inline long long clock64() { return static_cast<long long>(crossdockClock()); }
inline void __trap(crossdock::device::Location location = crossdock::device::Location::current()) {
    crossdockTrap("the kernel called __trap", crossdock::device::where(location));
}

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value)); }
inline int __clzll(long long value) {
    return value == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(value));
}
template <typename T>
T __ldg(const T* address) {
    return *address;
}
using std::max;
using std::min;
