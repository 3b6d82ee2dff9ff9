// SPDX-License-Identifier: Apache-2.0
// NCCL's groups of threads: tiles of a warp, some lanes, spans of warps, the block. All threads of a group call its
// functions together.
#pragma once

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
