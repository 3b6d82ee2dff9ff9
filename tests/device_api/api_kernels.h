// SPDX-License-Identifier: Apache-2.0
// Kernels that call what NCCL's Device API has, with the right results in them: api_test.cpp runs them on CPUs, and the
// CUDA build compiles them against NCCL's own header, so that names and parameters are the same.
#pragma once

#include "crossdock/device/kernel.hpp"

#define EXPECT_IN_KERNEL(condition) \
    do {                            \
        if (!(condition)) __trap(); \
    } while (false)

constexpr int kGetWords = 16;
constexpr size_t kGetBytes = kGetWords * sizeof(int);

// Every rank gets its neighbours' words. The window holds the own ones, then those of the next and the previous rank.
__global__ void gets(ncclDevComm comm, ncclWindow_t window) {
    ncclCoopCta block;
    ncclGin gin(comm, 0);
    const ncclTeam world = ncclTeamWorld(comm);
    int* words = static_cast<int*>(ncclGetLocalPointer(window, 0));
    const int next = (comm.rank + 1) % comm.nRanks;
    const int previous = (comm.rank + comm.nRanks - 1) % comm.nRanks;
    for (int round = 0; round < 2; ++round) {
        for (int i = static_cast<int>(threadIdx.x); i < kGetWords; i += static_cast<int>(blockDim.x)) {
            words[i] = 1000 * round + 100 * comm.rank + i;
        }
        ncclGinBarrierSession<ncclCoopCta> barrier(block, gin, ncclTeamTagWorld(), 0);
        barrier.sync(block, cuda::memory_order_acq_rel, ncclGinFenceLevel::None);
        gin.get(world, next, window, 0, window, kGetBytes, kGetBytes, block);
        gin.get(world, previous, window, 0, window, 2 * kGetBytes, kGetBytes, block, ncclGin_None{},
                ncclGinOptFlagsDefault, ncclGin_SegmentDevice{});
        if (round == 0) {
            gin.flush(block);
        } else {
            // By one thread, for what all of the block have posted.
            if (threadIdx.x == 0) {
                ncclGinRequest_t requests[2];
                gin.flushAsync(world, static_cast<uint32_t>(next), &requests[0]);
                gin.flushAsync(world, static_cast<uint32_t>(previous), &requests[1], ncclCoopThread{},
                               ncclGinOptFlagsDefault, ncclGin_None{});
                gin.wait(requests[1]);
                gin.wait(requests[0], ncclCoopThread{}, ncclGin_None{}, cuda::memory_order_acquire);
            }
            block.sync();
        }
        for (int i = 0; i < kGetWords; ++i) {
            EXPECT_IN_KERNEL(words[kGetWords + i] == 1000 * round + 100 * next + i);
            EXPECT_IN_KERNEL(words[2 * kGetWords + i] == 1000 * round + 100 * previous + i);
        }
        // All have got what they wanted, so words may change.
        barrier.sync(block, cuda::memory_order_acq_rel, ncclGinFenceLevel::None);
    }
}

// Gets that a barrier's fence waits for.
__global__ void fenced_gets(ncclDevComm comm, ncclWindow_t window) {
    ncclCoopWarp warp;
    ncclGin gin(comm, 1);
    const ncclTeam world = ncclTeamWorld(comm);
    int* words = static_cast<int*>(ncclGetLocalPointer(window, 0));
    if (warp.thread_rank() == 0) words[0] = 7 + comm.rank;
    ncclBarrierSession<ncclCoopWarp> barrier(warp, ncclTeamTagWorld(), gin, 0);
    barrier.sync(warp, cuda::memory_order_acq_rel, ncclGinFenceLevel::None);
    for (int peer = warp.thread_rank(); peer < comm.nRanks; peer += warp.size()) {
        gin.get(world, peer, window, 0, window, static_cast<size_t>(4 + 4 * peer), 4);
    }
    barrier.sync(warp, cuda::memory_order_acq_rel, ncclGinFenceLevel::Get);
    for (int peer = 0; peer < comm.nRanks; ++peer) EXPECT_IN_KERNEL(words[1 + peer] == 7 + peer);
}

// Signals in words of the window: two put words, which count, and one that only adds.
__global__ void va_signals(ncclDevComm comm, ncclWindow_t window) {
    ncclCoopThread thread;
    ncclGin gin(comm, 0);
    const ncclTeam world = ncclTeamWorld(comm);
    const int next = (comm.rank + 1) % comm.nRanks;
    const int previous = (comm.rank + comm.nRanks - 1) % comm.nRanks;
    const size_t first = 512, second = 520, third = 528;
    ncclSymPtr<int> words(window, 0);
    if (threadIdx.x == 0) {
        words.localPtr()[0] = 10 + comm.rank;
        words.localPtr()[1] = 20 + comm.rank;
        gin.put(world, next, words + 8, words, 1, ncclGin_WeakVASignalInc{window, first});
        gin.put(world, next, words + 9, words + 1, 1, ncclGin_None{}, ncclGin_WeakCounterInc{0});
        gin.putValue(world, next, words + 10, 30 + comm.rank, ncclGin_StrongVASignalAdd{window, second, 5});
        gin.signal(world, next, ncclGin_WeakVASignalAdd{window, third, 300});
        gin.signal(world, next, ncclGin_StrongVASignalInc{window, first});

        gin.waitSignal(thread, window, first, 2);
        gin.waitSignal(thread, window, second, 5, 32);
        gin.waitSignal(thread, window, third, 300, 16, cuda::memory_order_acquire);
        EXPECT_IN_KERNEL(words.localPtr()[8] == 10 + previous && words.localPtr()[9] == 20 + previous &&
                         words.localPtr()[10] == 30 + previous);
        EXPECT_IN_KERNEL(gin.readSignal(window, first) == 2 && gin.readSignal(window, second, 2) == 1);
        EXPECT_IN_KERNEL(gin.readSignal(window, third, 8) == 44);
        gin.resetSignal(window, first);
        EXPECT_IN_KERNEL(gin.readSignal(window, first) == 0);
        gin.waitCounter(thread, 0, 1);
        gin.flush(thread);
    }
}
