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
        // All gets have landed, so words may change.
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

// Groups of threads: type erasure, broadcasts, and properties.
template <typename Coop>
__device__ void check_group(Coop coop, int size) {
    ncclCoopAny any(coop);
    EXPECT_IN_KERNEL(any.size() == size && any.num_threads() == size && any.thread_rank() == coop.thread_rank());
    any.sync();
    const int root = size - 1;
    EXPECT_IN_KERNEL(ncclCoopBcast(coop, 10 * any.thread_rank(), root) == 10 * root);
    const longlong2 two = ncclCoopBcast(coop, longlong2{any.thread_rank(), 1ll << 40}, 0, true);
    EXPECT_IN_KERNEL(two.x == 0 && two.y == 1ll << 40);
    coop.sync();
}
__global__ void groups(ncclDevComm comm, ncclWindow_t window) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    check_group(ncclCoopThread(), 1);
    check_group(ncclCoopTile<8>(), 8);
    check_group(ncclCoopWarp(), 32);
    check_group(ncclCoopWarpSpan(warp / 2 * 2, 2, warp / 2), 64);
    check_group(ncclCoopCta(), static_cast<int>(blockDim.x));
    if (threadIdx.x % 32 % 3 == 1) check_group(ncclCoopLanes(0x92492492u), 11);
    EXPECT_IN_KERNEL(ncclCoopIsThread(ncclCoopThread()) && !ncclCoopIsThread(ncclCoopCta()));
    EXPECT_IN_KERNEL(ncclCoopWithinWarp(ncclCoopTile<4>()) && !ncclCoopWithinWarp(ncclCoopWarpSpan(0, 1, 0)));
    EXPECT_IN_KERNEL(ncclCoopCoalesced(ncclCoopCta()).size() == 32 && ncclCoopCoalesced(ncclCoopTile<4>()).size() == 4);
    EXPECT_IN_KERNEL(ncclCoopGetLaneMask(ncclCoopCoalesced(ncclCoopLanes(7))) == 7);
    const void* place = ncclGetLocalPointer(window, 100);
    EXPECT_IN_KERNEL(ncclFindWindow(ncclCoopWarp(), comm, place) == window);
}

// Barriers: over all contexts, as functions, of teams and handles of one's own, and with a timeout.
__global__ void barriers(ncclDevComm comm, ncclWindow_t window, ncclLsaBarrierHandle lsa, ncclGinBarrierHandle rail,
                         ncclGinSignal_t own_signal) {
    ncclCoopCta block;
    ncclGin gin(comm, 0), other(comm, 1);
    const ncclTeam world = ncclTeamWorld(comm);
    int* words = static_cast<int*>(ncclGetLocalPointer(window, 0));
    const int next = (comm.rank + 1) % comm.nRanks;
    const int previous = (comm.rank + comm.nRanks - 1) % comm.nRanks;
    // The fence covers a put and a get of the other context.
    for (int round = 0; round < 2; ++round) {
        if (threadIdx.x == 0) {
            words[0] = 10 * round + comm.rank;
            other.put(world, next, window, 64, window, 0, 4);
            other.flush(ncclCoopThread());
        }
        if (round == 0) {
            ncclGinBarrierSession<ncclCoopCta> all(block, ncclGinAllContexts(comm), ncclTeamTagWorld(), 0);
            all.sync(block, cuda::memory_order_acq_rel);
        } else {
            ncclGinBarrier(block, ncclGinAllContexts(comm), ncclTeamTagWorld(), 0);
        }
        EXPECT_IN_KERNEL(words[16] == 10 * round + previous);
        ncclGinBarrier(block, gin, ncclTeamTagWorld(), 1, cuda::memory_order_acq_rel, ncclGinFenceLevel::None);
    }
    // Inside and outside by barriers of the requirement list.
    ncclBarrierSession<ncclCoopCta> hybrid(block, ncclTeamLsa(comm), ncclTeamRail(comm), gin, lsa, rail, 1);
    hybrid.sync(block, cuda::memory_order_acq_rel, ncclGinFenceLevel::None);
    EXPECT_IN_KERNEL(hybrid.sync(block, cuda::memory_order_acq_rel, ncclGinFenceLevel::None, 1ull << 40) ==
                     ncclSuccess);
    ncclBarrier(block, ncclTeamTagWorld(), gin, 0);
    ncclBarrier(block, ncclTeamTagRail(), gin, 1, cuda::memory_order_acq_rel, ncclGinFenceLevel::Put);
    if (threadIdx.x == 0) {
        gin.signal(world, next, ncclGin_WeakSignalInc{own_signal});
        gin.waitSignal(ncclCoopThread(), own_signal, 1);
    }
    // Rank 0 enters this barrier after the others have timed out once.
    {
        ncclLsaBarrierSession<ncclCoopCta> late(block, comm, ncclTeamTagLsa(), 0);
        ncclGinBarrierSession<ncclCoopCta> told(block, gin, ncclTeamTagRail(), 0);
        if (comm.lsaRank != 0) {
            // Only threads that waited report the timeout.
            const ncclResult_t result = late.sync(block, cuda::memory_order_acq_rel, 1000);
            EXPECT_IN_KERNEL(result == ncclTimeout || static_cast<int>(threadIdx.x) >= comm.lsaSize - 1);
            if (threadIdx.x == 0) gin.signal(world, comm.rank - comm.lsaRank, ncclGin_StrongVASignalInc{window, 512});
            EXPECT_IN_KERNEL(late.wait(block, cuda::memory_order_acq_rel, 1ull << 40) == ncclSuccess);
        } else {
            gin.waitSignal(block, window, 512, static_cast<uint64_t>(comm.lsaSize - 1));
            late.sync(block, cuda::memory_order_acq_rel);
        }
    }
    // No other rank enters this barrier.
    if (comm.rank == 0 && comm.nRanks > 1 && threadIdx.x == 0) {
        ncclCoopThread thread;
        ncclGinBarrierSession<ncclCoopThread> alone(thread, gin, world, rail, 0);
        EXPECT_IN_KERNEL(alone.sync(thread, cuda::memory_order_acq_rel, ncclGinFenceLevel::None, 1000) == ncclTimeout);
    }
}

// A buffer of the requirement list, in which the ranks of an LSA team exchange their rank.
__global__ void resources(ncclDevComm comm, ncclWindow_t window, ncclDevResourceHandle buffer,
                          ncclDevResourceHandle second) {
    ncclCoopThread thread;
    EXPECT_IN_KERNEL(ncclGetResourceBufferOffset(second) % 512 == 0 && second > buffer);
    EXPECT_IN_KERNEL(ncclGetResourceBuffer(comm, buffer).localPtr() == ncclGetResourceBufferLocalPointer(comm, buffer));
    for (int peer = 0; peer < comm.lsaSize; ++peer) {
        static_cast<int*>(ncclGetResourceBufferLsaPointer(comm, buffer, peer))[comm.lsaRank] = comm.rank;
        static_cast<int*>(ncclGetResourceBufferPeerPointer(comm, second, ncclTeamLsa(comm), peer))[comm.lsaRank] = 1;
    }
    ncclLsaBarrierSession<ncclCoopThread> barrier(thread, comm, ncclTeamTagLsa(), 0);
    barrier.sync(thread, cuda::memory_order_acq_rel);
    for (int peer = 0; peer < comm.lsaSize; ++peer) {
        EXPECT_IN_KERNEL(static_cast<int*>(ncclGetResourceBufferLocalPointer(comm, buffer))[peer] ==
                         comm.rank - comm.lsaRank + peer);
        EXPECT_IN_KERNEL(static_cast<int*>(ncclGetResourceBufferLocalPointer(comm, second))[peer] == 1);
    }
    EXPECT_IN_KERNEL(window != comm.resourceWindow);
}

struct Triple {
    int a, b, c;
};
// Small all-to-alls without barriers, by the threads of a block. The first one's epoch is written to where NCCL keeps
// it, less 2.
__global__ void small_all_to_alls(ncclDevComm comm, ncclWindow_t, ncclLLA2AHandle handle, uint32_t first_epoch) {
    ncclCoopCta block;
    const ncclTeam lsa = ncclTeamLsa(comm);
    auto* words = static_cast<uint32_t*>(ncclGetResourceBufferLocalPointer(comm, handle.bufHandle));
    if (threadIdx.x == 0) words[4 * blockIdx.x * (1 + 2 * handle.nSlots)] = first_epoch - 2;
    block.sync();
    const int elements = 4 * lsa.nRanks;
    for (int session = 0; session < 2; ++session) {
        ncclLLA2ASession<ncclCoopCta> a2a(block, comm, lsa, handle, blockIdx.x, elements);
        for (int round = 0; round < 3; ++round) {
            for (int i = static_cast<int>(threadIdx.x); i < lsa.nRanks; i += static_cast<int>(blockDim.x)) {
                a2a.send(i, round * lsa.nRanks + lsa.rank, Triple{100 * round + 10 * lsa.rank + i, round, 7});
            }
            if (threadIdx.x == 0) a2a.bcast(3 * lsa.nRanks + lsa.rank, 5 + lsa.rank);
            for (int i = static_cast<int>(threadIdx.x); i < lsa.nRanks; i += static_cast<int>(blockDim.x)) {
                const Triple got = a2a.recv<Triple>(round * lsa.nRanks + i);
                EXPECT_IN_KERNEL(got.a == 100 * round + 10 * i + lsa.rank && got.b == round && got.c == 7);
            }
            const int sum = a2a.recvReduce<2, int>(
                3 * lsa.nRanks, lsa.nRanks, 1, [](int x) { return 2 * x; }, [](int x, int y) { return x + y; });
            int twice = 0;
            for (int i = 0; i < lsa.nRanks; ++i) twice += 2 * (5 + i);
            EXPECT_IN_KERNEL(sum == twice);
            // Of no element, so it does not wait for one that nobody sends.
            a2a.recvReduce<2, int>(
                2 * elements - 1, 0, 1, [](int x) { return x; }, [](int x, int y) { return x + y; });
            a2a.endEpoch(block);
        }
    }
}

// Sums and copies over the LSA team: the window holds kGetWords floats per rank, then a sum, a copy, and room.
__global__ void reductions(ncclDevComm comm, ncclWindow_t window, ncclMultimemHandle handle, bool multimem) {
    ncclCoopCta block;
    const ncclTeam lsa = ncclTeamLsa(comm);
    const size_t n = kGetWords;
    ncclSymPtr<float> source(window, 0), sum(window, 512), copy(window, 1024), scratch(window, 2048);
    ncclLsaBarrierSession<ncclCoopCta> barrier(block, comm, ncclTeamTagLsa(), 0, multimem);
    for (int i = static_cast<int>(threadIdx.x); i < kGetWords; i += static_cast<int>(blockDim.x)) {
        source.localPtr()[i] = static_cast<float>(i + 100 * lsa.rank);
    }
    const auto expected = [&](int i) {
        return static_cast<float>(i * lsa.nRanks + 100 * lsa.nRanks * (lsa.nRanks - 1) / 2);
    };
    barrier.sync(block, cuda::memory_order_acq_rel);
    float* own = scratch.localPtr();
    ncclLsaReduceSum<float>(block, source, own, n, lsa);
    ncclLsaReduceSum<float>(block, source, own + n, n, comm);
    ncclLsaReduceSum<float>(block, window, size_t{0}, own + 2 * n, n, lsa);
    ncclLsaReduceSum<float>(block, window, size_t{0}, own + 3 * n, n, comm);
    if (multimem) {
        ncclMultimemReduceSum<float>(block, source, own + 4 * n, n, handle);
        ncclMultimemReduceSum<float>(block, source.lsaMultimemPtr(comm), own + 5 * n, n);
        ncclMultimemReduceSum<float>(block, window, size_t{0}, own + 6 * n, n, handle);
    }
    block.sync();
    for (int i = 0; i < (multimem ? 7 : 4) * kGetWords; ++i) EXPECT_IN_KERNEL(own[i] == expected(i % kGetWords));
    // Own memory: the sum of the first two sums, in two places.
    ncclLocalReduceSum<float>(block, 2, own, n, own + 8 * n, n);
    block.sync();
    ncclLocalCopy<float>(block, own + 8 * n, 2, own + 9 * n, n, n);
    ncclLocalReduceSumCopy<float>(block, 2, own, n, 1, own + 11 * n, n, n);
    block.sync();
    for (int i = 0; i < kGetWords; ++i) {
        EXPECT_IN_KERNEL(own[10 * kGetWords + i] == 2 * expected(i) && own[11 * kGetWords + i] == 2 * expected(i));
    }
    // Rank 0 sums up for all and stores at all; every rank copies a word to all.
    if (lsa.rank == 0) {
        if (multimem) {
            ncclMultimemReduceSumCopy<float>(block, source, handle, sum, handle, n);
        } else {
            ncclLsaReduceSumCopy<float>(block, source, sum, n, lsa);
        }
    }
    if (multimem) {
        ncclMultimemCopy<float>(block, source.localPtr(), (copy + lsa.rank).lsaMultimemPtr(comm), size_t{1});
    } else {
        ncclLsaCopy<float>(block, source.localPtr(), copy + lsa.rank, size_t{1}, lsa);
    }
    barrier.sync(block, cuda::memory_order_acq_rel);
    for (int i = 0; i < kGetWords; ++i) EXPECT_IN_KERNEL(sum.localPtr()[i] == expected(i));
    for (int i = 0; i < lsa.nRanks; ++i) EXPECT_IN_KERNEL(copy.localPtr()[i] == static_cast<float>(100 * i));
}
