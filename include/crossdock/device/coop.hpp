// SPDX-License-Identifier: Apache-2.0
// NCCL's groups of threads: tiles of a warp, some lanes, spans of warps, the block. All threads of a group call its
// functions together.
#pragma once

#include <new>

#include "crossdock/device/core.hpp"
#include "crossdock/device/warp.hpp"

template <int nThreadsPow2>
struct ncclCoopTile {
    static_assert(nThreadsPow2 >= 1 && nThreadsPow2 <= 32 && (nThreadsPow2 & (nThreadsPow2 - 1)) == 0,
                  "a tile has 1, 2, 4, 8, 16 or 32 threads");
    int thread_rank() const { return crossdock::device::lane() % nThreadsPow2; }
    constexpr int size() const { return nThreadsPow2; }
    constexpr int num_threads() const { return nThreadsPow2; }
    uint32_t laneMask() const { return (~0u >> (32 - nThreadsPow2)) << (crossdock::device::lane() & -nThreadsPow2); }
    void sync() {
        if constexpr (nThreadsPow2 > 1) __syncwarp(laneMask());
    }
};
typedef ncclCoopTile<1> ncclCoopThread;
typedef ncclCoopTile<32> ncclCoopWarp;

struct ncclCoopLanes {
    uint32_t lmask;
    constexpr ncclCoopLanes(uint32_t mask = ~0u) : lmask(mask) {}
    int thread_rank() const { return __popc(lmask & ((1u << crossdock::device::lane()) - 1)); }
    int size() const { return __popc(lmask); }
    int num_threads() const { return __popc(lmask); }
    void sync() { __syncwarp(lmask); }
};

// Warps in a row, with a number of 0..14 that no other span uses at the same time.
struct ncclCoopWarpSpan {
    uint32_t warp0 : 8, nWarps : 8, id : 8;
    constexpr ncclCoopWarpSpan(int first, int warps, int number)
        : warp0(static_cast<uint8_t>(first)), nWarps(static_cast<uint8_t>(warps)), id(static_cast<uint8_t>(number)) {}
    int thread_rank() const { return static_cast<int>(threadIdx.x) - 32 * static_cast<int>(warp0); }
    int size() const { return 32 * static_cast<int>(nWarps); }
    int num_threads() const { return size(); }
    void sync() { __barrier_sync_count(1 + id, 32 * nWarps); }
};

struct ncclCoopCta {
    int thread_rank() const { return static_cast<int>(threadIdx.x); }
    int size() const { return static_cast<int>(blockDim.x); }
    int num_threads() const { return static_cast<int>(blockDim.x); }
    void sync() { __syncthreads(); }
};

inline ncclCoopLanes ncclCoopCoalesced() { return ncclCoopLanes{__activemask()}; }
// Threads of the own warp that act together when all of coop do.
template <typename Coop>
ncclCoopTile<32> ncclCoopCoalesced(Coop) {
    return {};
}
inline ncclCoopLanes ncclCoopCoalesced(ncclCoopLanes coop) { return coop; }
template <int nThreads>
ncclCoopTile<nThreads> ncclCoopCoalesced(ncclCoopTile<nThreads> coop) {
    return coop;
}

template <int nThreads>
uint32_t ncclCoopGetLaneMask(ncclCoopTile<nThreads> coop) {
    return coop.laneMask();
}
inline uint32_t ncclCoopGetLaneMask(ncclCoopLanes coop) { return coop.lmask; }
inline uint32_t ncclCoopGetLaneMask(ncclCoopWarpSpan) { return ~0u; }
inline uint32_t ncclCoopGetLaneMask(ncclCoopCta) { return ~0u; }

// Known when compiling: one thread, and threads of one warp.
template <int nThreads>
constexpr bool ncclCoopIsThread(ncclCoopTile<nThreads>) {
    return nThreads == 1;
}
constexpr bool ncclCoopIsThread(ncclCoopLanes) { return false; }
constexpr bool ncclCoopIsThread(ncclCoopWarpSpan) { return false; }
constexpr bool ncclCoopIsThread(ncclCoopCta) { return false; }
template <int nThreads>
constexpr bool ncclCoopWithinWarp(ncclCoopTile<nThreads>) {
    return true;
}
constexpr bool ncclCoopWithinWarp(ncclCoopLanes) { return true; }
constexpr bool ncclCoopWithinWarp(ncclCoopWarpSpan) { return false; }
constexpr bool ncclCoopWithinWarp(ncclCoopCta) { return false; }

namespace crossdock::device {

inline int thread_in_block() {
    return static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
}
// The first thread of the group that calls, as its number in the grid.
template <typename Coop>
int leader_of(Coop coop) {
    const int block = static_cast<int>(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
    return block * 1024 + thread_in_block() - coop.thread_rank();
}
inline int leader_of(ncclCoopLanes coop) {
    const int block = static_cast<int>(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
    return block * 1024 + thread_in_block() - lane() + __builtin_ctz(coop.lmask);
}

}  // namespace crossdock::device

// Any of the groups above.
struct ncclCoopAny {
    ncclCoopAny() = default;
    ncclCoopAny(const ncclCoopAny&) = default;
    template <typename Impl>
    ncclCoopAny(Impl impl) : functions_(functions_of<Impl>()) {
        static_assert(sizeof(Impl) <= sizeof(memory_) && alignof(Impl) <= alignof(void*), "no group of NCCL's");
        ::new (memory_) Impl(impl);
    }
    int thread_rank() const { return functions_->thread_rank(memory_); }
    int size() const { return functions_->size(memory_); }
    int num_threads() const { return size(); }
    void sync() { functions_->sync(memory_); }
    int crossdock_leader() const { return functions_->leader(memory_); }

  private:
    struct Functions {
        int (*thread_rank)(const void*);
        int (*size)(const void*);
        int (*leader)(const void*);
        void (*sync)(void*);
    };
    template <typename Impl>
    static const Functions* functions_of() {
        static constexpr Functions kFunctions = {
            [](const void* impl) { return static_cast<const Impl*>(impl)->thread_rank(); },
            [](const void* impl) { return static_cast<const Impl*>(impl)->size(); },
            [](const void* impl) { return crossdock::device::leader_of(*static_cast<const Impl*>(impl)); },
            [](void* impl) { static_cast<Impl*>(impl)->sync(); }};
        return &kFunctions;
    }

    alignas(void*) std::byte memory_[16];
    const Functions* functions_;
};
namespace crossdock::device {

inline int leader_of(const ncclCoopAny& coop) { return coop.crossdock_leader(); }

template <typename T>
T broadcast_in_warp(unsigned mask, T value, int lane) {
    constexpr size_t kWords = (sizeof(T) + 3) / 4;
    uint32_t words[kWords] = {};
    std::memcpy(words, &value, sizeof(T));
    for (uint32_t& word : words) word = value_of_lane(mask, word, lane);
    std::memcpy(&value, words, sizeof(T));
    return value;
}
template <typename T, typename Coop>
T broadcast_in_block(Coop coop, T value, int root, int number, bool entry_sync) {
    static_assert(sizeof(T) <= 16, "a broadcast in a block moves at most 16 bytes");
    void* scratch = crossdockBlockScratch(number);
    if (entry_sync) coop.sync();
    if (coop.thread_rank() == root) std::memcpy(scratch, &value, sizeof(T));
    coop.sync();
    std::memcpy(&value, scratch, sizeof(T));
    return value;
}

}  // namespace crossdock::device

// The value of the group's thread `root`. In a block the next broadcast needs its entrySync, or a sync before.
template <int nThreads, typename T>
T ncclCoopBcast(ncclCoopTile<nThreads> coop, T value, int root, bool /*entrySync*/ = true) {
    const int first = crossdock::device::lane() & -nThreads;
    return crossdock::device::broadcast_in_warp(coop.laneMask(), value, first + root);
}
template <typename T>
T ncclCoopBcast(ncclCoopLanes coop, T value, int root, bool /*entrySync*/ = true) {
    uint32_t rest = coop.lmask;
    for (int i = 0; i < root; ++i) rest &= rest - 1;
    return crossdock::device::broadcast_in_warp(coop.lmask, value, __builtin_ctz(rest));
}
template <typename T>
T ncclCoopBcast(ncclCoopWarpSpan coop, T value, int root, bool entrySync = true) {
    return crossdock::device::broadcast_in_block(coop, value, root, coop.id, entrySync);
}
template <typename T>
T ncclCoopBcast(ncclCoopCta coop, T value, int root, bool entrySync = true) {
    return crossdock::device::broadcast_in_block(coop, value, root, 15, entrySync);
}

// The own window that contains the address. Error where there is none.
template <typename Coop>
ncclWindow_t ncclFindWindow(Coop, const ncclDevComm&, const void* ptr,
                            crossdock::device::Location location = crossdock::device::Location::current()) {
    size_t offset = 0;
    return crossdockFindWindow(ptr, &offset, crossdock::device::where(location));
}
