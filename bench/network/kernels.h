// SPDX-License-Identifier: Apache-2.0
// The kernels that network_bench measures, for CPUs and GPUs alike. The window holds sources, then targets, half each;
// each context has stride_of(bytes) of both. One thread per block does everything: it is the latency of the operations
// that counts.
//
// Signals only grow; `done` is how many rounds earlier launches had, so that each launch waits for more than the last.
#pragma once

#include "crossdock/device/kernel.hpp"

namespace crossdock::network_bench {

enum Signal : ncclGinSignal_t { kTurn, kSent, kCame, kNumSignals };
inline constexpr int kPutsPerBatch = 32;

__host__ __device__ inline size_t stride_of(size_t bytes) { return (bytes + 127) / 128 * 128; }

// Two ranks send a put with a weak signal back and forth. ticks: of `turns` round trips, by clock64().
__global__ void ping_pong(ncclDevComm comm, ncclWindow_t window, size_t bytes, size_t target, uint64_t done,
                          uint64_t turns, long long* ticks) {
    ncclGin gin(comm, 0);
    const ncclTeam world = ncclTeamWorld(comm);
    const int peer = 1 - comm.rank;
    const long long begin = clock64();
    for (uint64_t turn = done + 1; turn <= done + turns; ++turn) {
        if (comm.rank == 1) gin.waitSignal(ncclCoopThread(), kTurn, turn);
        gin.put(world, peer, window, target, window, 0, bytes, ncclGin_WeakSignalInc{kTurn});
        if (comm.rank == 0) gin.waitSignal(ncclCoopThread(), kTurn, turn);
    }
    *ticks = clock64() - begin;
    gin.flush(ncclCoopThread());
}

// Rank 0 puts batches, at most two ahead of rank 1, which answers each. Block i uses context first_context + i and its
// own part of the window. ticks: one entry per block.
__global__ void stream(ncclDevComm comm, ncclWindow_t window, size_t bytes, size_t target, int first_context,
                       uint64_t done, uint64_t batches, long long* ticks) {
    const int context = first_context + static_cast<int>(blockIdx.x);
    ncclGin gin(comm, context);
    const ncclTeam world = ncclTeamWorld(comm);
    const int peer = 1 - comm.rank;
    const size_t part = static_cast<size_t>(context) * stride_of(bytes);
    const long long begin = clock64();
    for (uint64_t batch = done + 1; batch <= done + batches; ++batch) {
        if (comm.rank == 1) {
            gin.waitSignal(ncclCoopThread(), kSent, batch);
            gin.signal(world, peer, ncclGin_WeakSignalInc{kCame});
            continue;
        }
        if (batch > 2) gin.waitSignal(ncclCoopThread(), kCame, batch - 2);
        for (int i = 1; i < kPutsPerBatch; ++i) {
            gin.put(world, peer, window, target + part, window, part, bytes);
        }
        gin.put(world, peer, window, target + part, window, part, bytes, ncclGin_StrongSignalInc{kSent});
    }
    if (comm.rank == 0) gin.waitSignal(ncclCoopThread(), kCame, done + batches);
    ticks[blockIdx.x] = clock64() - begin;
    gin.flush(ncclCoopThread());
}

}  // namespace crossdock::network_bench
