// SPDX-License-Identifier: Apache-2.0
// Puts, signals, counters, flushes and barriers have the same effect directly and by the proxy, between threads,
// processes and hosts.
#include <gtest/gtest.h>

#include <numeric>

#include "ways.h"

namespace {

#define EXPECT_IN_KERNEL(condition) \
    do {                            \
        if (!(condition)) __trap(); \
    } while (false)

class GinWays : public testing::TestWithParam<Way> {
  protected:
    void expect_success(const ::Setup& setup, const Body& body) { EXPECT_EQ(on(GetParam(), setup, body), ""); }
};
INSTANTIATE_TEST_SUITE_P(All, GinWays, testing::ValuesIn(kWays), [](const auto& info) { return info.param.name(); });

constexpr int kNumPuts = 40;

__device__ int* words(ncclWindow_t window, size_t offset = 0) {
    return static_cast<int*>(ncclGetLocalPointer(window, offset));
}

// A flushed source may change, and after a strong signal all earlier puts have landed. The queue is shorter than the
// number of operations.
__global__ void flushed_sources(ncclDevComm comm, ncclWindow_t window) {
    ncclGin gin(comm, 0);
    const ncclTeam world = ncclTeamWorld(comm);
    const int peer = (comm.rank + 1) % comm.nRanks;
    for (int i = 0; i < kNumPuts; ++i) {
        words(window)[0] = 100 * comm.rank + i;
        gin.put(world, peer, window, 64 + 4 * i, window, 0, 4);
        gin.flush(ncclCoopThread());
    }
    gin.signal(world, peer, ncclGin_StrongSignalInc{0});
    gin.waitSignal(ncclCoopThread(), 0, 1);
    const int from = (comm.rank + comm.nRanks - 1) % comm.nRanks;
    for (int i = 0; i < kNumPuts; ++i) EXPECT_IN_KERNEL(words(window, 64)[i] == 100 * from + i);
}
TEST_P(GinWays, FlushedSourcesMayChange) {
    expect_success({.ranks = 2, .queue_depth = 4}, launching(1, 1, flushed_sources));
}

// More puts than a queue holds wait for room, and one strong signal covers all of them: values, small and large ones.
__global__ void many_before_one_signal(ncclDevComm comm, ncclWindow_t window) {
    ncclGin gin(comm, 1);
    const ncclTeam world = ncclTeamWorld(comm);
    const int peer = 1 - comm.rank;
    for (int i = 0; i < 256; ++i) words(window)[i] = 1000 * comm.rank + i;
    for (int i = 0; i < kNumPuts; ++i) {
        gin.put(world, peer, window, 1024 + 4 * i, window, 4 * i, 4);
        gin.putValue(world, peer, window, 1280 + 8 * i, uint64_t{7} << 32 | static_cast<uint64_t>(i));
    }
    gin.put(world, peer, window, 2048, window, 0, 1024, ncclGin_StrongSignalAdd{3, 5});
    gin.waitSignal(ncclCoopThread(), 3, 5);
    for (int i = 0; i < kNumPuts; ++i) {
        EXPECT_IN_KERNEL(words(window, 1024)[i] == 1000 * peer + i);
        EXPECT_IN_KERNEL(words(window, 1280)[2 * i] == i && words(window, 1280)[2 * i + 1] == 7);
    }
    for (int i = 0; i < 256; ++i) EXPECT_IN_KERNEL(words(window, 2048)[i] == 1000 * peer + i);
    gin.flush(ncclCoopThread());
}
TEST_P(GinWays, AStrongSignalCoversAllBeforeIt) {
    for (const int depth : {1, 2}) {
        expect_success({.ranks = 2, .queue_depth = depth}, launching(1, 1, many_before_one_signal));
    }
}

// After a weak signal its own put has landed, and after a counter its source has been read.
__global__ void weak_signals(ncclDevComm comm, ncclWindow_t window) {
    ncclGin gin(comm, 0);
    const ncclTeam world = ncclTeamWorld(comm);
    const int peer = 1 - comm.rank;
    for (int i = 0; i < kNumPuts; ++i) {
        words(window)[0] = words(window)[15] = 10 * i + comm.rank;
        gin.put(world, peer, window, 64, window, 0, 64, ncclGin_WeakSignalInc{0}, ncclGin_WeakCounterInc{1});
        gin.waitCounter(ncclCoopThread(), 1, static_cast<uint64_t>(i) + 1);
        words(window)[0] = words(window)[15] = -1;
        gin.waitSignal(ncclCoopThread(), 0, static_cast<uint64_t>(i) + 1);
        EXPECT_IN_KERNEL(words(window)[16] == 10 * i + peer && words(window)[31] == 10 * i + peer);
        // The reply, a value with a signal, allows the next write to the target.
        gin.putValue(world, peer, window, 128, i, ncclGin_WeakSignalAdd{1, 2});
        gin.waitSignal(ncclCoopThread(), 1, 2 * (static_cast<uint64_t>(i) + 1));
        EXPECT_IN_KERNEL(words(window)[32] == i);
    }
    EXPECT_IN_KERNEL(gin.readCounter(1) == kNumPuts && gin.readCounter(0) == 0);
}
TEST_P(GinWays, WeakSignalsAndCounters) { expect_success({.ranks = 2}, launching(1, 1, weak_signals)); }

// All kinds of barriers, between two hosts of two ranks: GIN outside, LSA inside. Each round's puts have arrived.
__global__ void rounds(ncclDevComm comm, ncclWindow_t window) {
    const ncclCoopCta block;
    ncclGin gin(comm, 0);
    const ncclTeam world = ncclTeamWorld(comm), rail = ncclTeamRail(comm), lsa = ncclTeamLsa(comm);
    EXPECT_IN_KERNEL(comm.nRanks == 4 && lsa.nRanks == 2 && rail.nRanks == 2);
    ncclBarrierSession<ncclCoopCta> hybrid(block, ncclTeamTagWorld(), gin, blockIdx.x);
    ncclGinBarrierSession<ncclCoopCta> rails(block, gin, ncclTeamTagRail(), blockIdx.x);
    for (int round = 1; round <= 10; ++round) {
        int* own = words(window);
        if (threadIdx.x == 0) own[0] = 100 * round + comm.rank;
        __syncthreads();
        for (int peer = threadIdx.x; peer < comm.nRanks; peer += blockDim.x) {
            gin.put(world, peer, window, 64 + 4 * comm.rank, window, 0, 4);
        }
        hybrid.sync(block, cuda::memory_order_acq_rel);
        for (int peer = threadIdx.x; peer < comm.nRanks; peer += blockDim.x) {
            EXPECT_IN_KERNEL(own[16 + peer] == 100 * round + peer);
        }
        // Stores to LSA peers, and a barrier that covers no puts.
        if (threadIdx.x == 0) {
            for (int near = 0; near < lsa.nRanks; ++near) {
                *static_cast<int*>(ncclGetLsaPointer(window, 128 + 4 * comm.lsaRank, near)) = round;
            }
        }
        hybrid.sync(block, cuda::memory_order_acq_rel, ncclGinFenceLevel::Relaxed);
        EXPECT_IN_KERNEL(own[32] == round && own[33] == round);
        rails.sync(block, cuda::memory_order_acq_rel);
        // The put of this round must have read its source before the next one writes it.
        gin.flush(block);
        hybrid.sync(block, cuda::memory_order_acq_rel);
    }
}
TEST_P(GinWays, BarriersBetweenHostsAndInside) { expect_success({.ranks = 4, .lsa_team = 2}, launching(1, 8, rounds)); }

// Several threads of a rank launch kernels at once, which share a context.
__global__ void one_of_several(ncclDevComm comm, ncclWindow_t window, int launcher) {
    ncclGin gin(comm, 0);
    const int peer = 1 - comm.rank;
    for (int i = 0; i < kNumPuts; ++i) {
        gin.putValue(ncclTeamWorld(comm), peer, window, 64 + 256 * launcher + 4 * i, i + launcher,
                     ncclGin_WeakSignalInc{static_cast<ncclGinSignal_t>(launcher)});
    }
    gin.waitSignal(ncclCoopThread(), static_cast<ncclGinSignal_t>(launcher), kNumPuts);
    for (int i = 0; i < kNumPuts; ++i) EXPECT_IN_KERNEL(words(window, 64 + 256 * launcher)[i] == i + launcher);
}
TEST_P(GinWays, SeveralLaunchesShareAContext) {
    expect_success({.ranks = 2, .queue_depth = 4}, [](TestRank& rank) {
        ncclResult_t results[3];
        std::vector<std::thread> threads;
        for (int launcher = 0; launcher < 3; ++launcher) {
            threads.emplace_back([&, launcher] {
                results[launcher] =
                    crossdockLaunch(rank.self.comm, 1, 1, 0, nullptr, one_of_several, rank.comm, rank.window, launcher);
            });
        }
        for (std::thread& thread : threads) thread.join();
        return std::accumulate(
            std::begin(results), std::end(results), ncclSuccess,
            [](ncclResult_t first, ncclResult_t next) { return first != ncclSuccess ? first : next; });
    });
}

// Destroying a communicator whose kernel has not flushed loses no operation.
__global__ void unflushed(ncclDevComm comm, ncclWindow_t window) {
    ncclGin gin(comm, 0);
    for (int i = 0; i < kNumPuts; ++i) {
        gin.put(ncclTeamWorld(comm), 1 - comm.rank, window, 2048, window, 0, 2048, ncclGin_WeakSignalInc{0});
    }
    gin.waitSignal(ncclCoopThread(), 0, kNumPuts);
}
TEST_P(GinWays, MemoryMayGoWithoutAFlush) { expect_success({.ranks = 2}, launching(1, 1, unflushed)); }

// A rank's properties name the GIN type.
TEST_P(GinWays, PropertiesNameTheWay) {
    expect_success({.ranks = 2}, [&](TestRank& rank) {
        ncclCommProperties props = NCCL_COMM_PROPERTIES_INITIALIZER;
        const ncclResult_t result = ncclCommQueryProperties(rank.self.comm, &props);
        const auto expected = *GetParam().gin_type == '2' ? NCCL_GIN_TYPE_PROXY : NCCL_GIN_TYPE_GPI;
        return result != ncclSuccess ? result : props.ginType == expected ? ncclSuccess : ncclInternalError;
    });
}

// A wait with the proxy that times out names the proxy's state.
TEST(GinProxy, AWaitThatExpiresNamesTheProxysState) {
    const GinType type("2");
    setenv("CROSSDOCK_GIN_TIMEOUT_MS", "1000", 1);
    const std::string failure = on_threads({.ranks = 1}, launching(
                                                             1, 1, +[](ncclDevComm comm, ncclWindow_t window) {
                                                                 ncclGin gin(comm, 0);
                                                                 gin.putValue(ncclTeamWorld(comm), 0, window, 0, 1);
                                                                 gin.flush(ncclCoopThread());
                                                                 gin.waitSignal(ncclCoopThread(), 3, 7);
                                                             }));
    unsetenv("CROSSDOCK_GIN_TIMEOUT_MS");
    EXPECT_NE(failure.find("expected 7, seen 0; the proxy "), std::string::npos) << failure;
    EXPECT_NE(failure.find("to rank 0: 1 queued, 1 posted, 1 of them read"), std::string::npos) << failure;
}

TEST(GinProxy, AnUnknownTypeIsRefused) {
    const GinType type("5");
    EXPECT_NE(
        on_threads({.ranks = 1}, [](TestRank&) { return ncclSuccess; }).find("NCCL_GIN_TYPE is 5, allowed: 2 (proxy)"),
        std::string::npos);
}

TEST(GinProxy, AQueueDepthOutOfRangeIsRefused) {
    EXPECT_NE(on_threads({.ranks = 1, .queue_depth = -1}, [](TestRank&) { return ncclSuccess; })
                  .find("reqs->ginQueueDepth is -1, allowed: 0..65536"),
              std::string::npos);
}

#if defined(DEVICE_API_HAS_HOSTS)
// A put to a rank that has left is an error that names it.
TEST(GinHosts, APutToARankThatLeftIsNamed) {
    for (const Way& way : {Way{"hosts", "4"}, Way{"hosts", "2"}}) {
        const std::string failure = on(way, {.ranks = 2}, [](TestRank& rank) {
            if (rank.self.rank == 1) _exit(0);
            setenv("CROSSDOCK_GIN_TIMEOUT_MS", "30000", 1);
            return crossdockLaunch(
                rank.self.comm, 1, 1, 0, nullptr,
                +[](ncclDevComm comm, ncclWindow_t window) {
                    ncclGin gin(comm, 0);
                    for (;;) {
                        gin.put(ncclTeamWorld(comm), 1, window, 0, window, 64, 64);
                        gin.flush(ncclCoopThread());
                        __nanosleep(100000);
                    }
                },
                rank.comm, rank.window);
        });
        EXPECT_NE(failure.find("rank 1"), std::string::npos) << way.name() << ": " << failure;
        EXPECT_EQ(failure.find("timed out"), std::string::npos) << way.name() << ": " << failure;
    }
}
#endif

}  // namespace
