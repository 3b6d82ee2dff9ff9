// SPDX-License-Identifier: Apache-2.0
// Communicators of threads and in the simulation, through the C functions of crossdock.h and through the
// library's own interface: exchanges are bounded and name missing ranks, memory is symmetric, windows and handles are
// refused after their end.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <functional>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/log.h"
#include "crossdock.h"
#include "crossdock/device/entry.hpp"
#include "crossdock/simulation.h"
#include "fabric/communicator.h"
#include "fabric/cpu/in_process_communicator.h"
#include "fabric/cpu/registry.h"
#include "messages.h"
#include "nccl_ep.h"
#include "runtime/cpu/executor.h"
#include "runtime/runtime.h"

namespace crossdock::cpu {
namespace {

constexpr uint64_t kSecond = 1'000'000'000;
using RankProgram = std::function<void(ncclComm_t comm, int rank)>;

void run_threads(int num_ranks, const RankProgram& program) {
    std::vector<ncclComm_t> comms(static_cast<size_t>(num_ranks));
    ASSERT_EQ(crossdockCommInitAll(comms.data(), num_ranks), ncclSuccess);
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < num_ranks; ++rank) {
        ranks.emplace_back([&, rank] { program(comms[static_cast<size_t>(rank)], rank); });
    }
    for (auto& rank : ranks) rank.join();
    for (ncclComm_t comm : comms) EXPECT_EQ(crossdockCommDestroy(comm), ncclSuccess);
}

void run_simulated(int num_ranks, const RankProgram& program) {
    for (uint64_t seed = 0; seed < 10; ++seed) run_simulation(num_ranks, {.seed = seed}, program);
}

class InProcessBackends : public testing::TestWithParam<const char*> {
  protected:
    void run(int num_ranks, const RankProgram& program) {
        GetParam() == kThreadsBackend.name ? run_threads(num_ranks, program) : run_simulated(num_ranks, program);
    }
};

INSTANTIATE_TEST_SUITE_P(CpuBackends, InProcessBackends, testing::Values(kThreadsBackend.name, kSimulationBackend.name),
                         [](const auto& backend) { return std::string(backend.param); });

TEST_P(InProcessBackends, KnowTheirRanks) {
    run(5, [&](ncclComm_t comm, int rank) {
        int got_rank = -1;
        int got_count = -1;
        EXPECT_EQ(crossdockCommUserRank(comm, &got_rank), ncclSuccess);
        EXPECT_EQ(crossdockCommCount(comm, &got_count), ncclSuccess);
        EXPECT_EQ(got_rank, rank);
        EXPECT_EQ(got_count, 5);
        int is_cpu = 0;
        EXPECT_EQ(crossdockCommIsCpu(comm, &is_cpu), ncclSuccess);
        EXPECT_EQ(is_cpu, 1);
        EXPECT_STREQ(communicator_of(comm)->backend().name, GetParam());
    });
}

// Sizes around the mailbox's chunk, one after the other, so that a fast rank is a call ahead of a slow one.
TEST_P(InProcessBackends, GatherAnySize) {
    constexpr int kRanks = 4;
    run(kRanks, [](ncclComm_t comm, int rank) {
        for (const size_t bytes : {0u, 1u, 7u, 8u, 100u, 4095u, 4096u, 4097u, 8192u, 30000u}) {
            const std::vector<unsigned char> own(bytes, static_cast<unsigned char>(rank + 1));
            std::vector<unsigned char> all(bytes * kRanks);
            ASSERT_EQ(crossdockCommAllGather(comm, own.data(), all.data(), bytes), ncclSuccess) << last_error();
            for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], i / bytes + 1) << bytes << " bytes, at " << i;
        }
    });
}

TEST_P(InProcessBackends, GatherManyTimes) {
    run(3, [](ncclComm_t comm, int rank) {
        for (int round = 0; round < 300; ++round) {
            const int own = round * 10 + rank;
            int all[3];
            ASSERT_EQ(crossdockCommAllGather(comm, &own, all, sizeof(own)), ncclSuccess) << last_error();
            for (int peer = 0; peer < 3; ++peer) ASSERT_EQ(all[peer], round * 10 + peer);
        }
        EXPECT_EQ(crossdockCommBarrier(comm), ncclSuccess);
    });
}

TEST_P(InProcessBackends, NameTheRanksThatDoNotCome) {
    run(4, [](ncclComm_t comm, int rank) {
        if (rank == 1 || rank == 3) return;
        const auto communicator = communicator_of(comm);
        const std::string message =
            message_of([&] { communicator->barrier("group creation", 3 * kSecond); }, ncclRemoteError);
        expect_mentions(message, {"group creation", "ranks 1, 3"});
    });
}

// Rank 0 gives up on rank 1, which makes the call later and finds rank 0's part of it.
TEST_P(InProcessBackends, GoOnAfterATimeout) {
    std::atomic<bool> gave_up{false};
    run(2, [&](ncclComm_t comm, int rank) {
        const auto communicator = communicator_of(comm);
        if (rank == 0) {
            message_of([&] { communicator->barrier("first", 1'000'000); }, ncclRemoteError);
            gave_up = true;
        } else {
            communicator->runtime().cpu_executor()->wait([&] { return gave_up.load(); }, UINT64_MAX);
            communicator->barrier("first", 100 * kSecond);
        }
        const int own = rank;
        int all[2] = {-1, -1};
        communicator->all_gather(&own, all, sizeof(int), "second", 100 * kSecond);
        EXPECT_EQ(all[0], 0);
        EXPECT_EQ(all[1], 1);
        gave_up = false;
    });
}

// The timeout of a group's operations, here 1 ms, does not lose a rank that is slow while groups and handles are made.
TEST_P(InProcessBackends, WaitForRanksThatMakeGroupsLate) {
    run(2, [](ncclComm_t comm, int rank) {
        const auto executor = communicator_of(comm)->runtime().cpu_executor();
        const auto be_late = [&] {
            if (rank == 1) executor->wait([] { return false; }, executor->now_ns() + 30'000'000);
        };
        for (const ncclEpAlgorithm_t algorithm : {NCCL_EP_ALGO_LOW_LATENCY, NCCL_EP_ALGO_HIGH_THROUGHPUT}) {
            ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
            config.algorithm = algorithm;
            config.num_experts = config.max_dispatch_tokens_per_rank = 2;
            config.max_token_bytes = 16;
            config.timeout_ns = 1'000'000;
            const bool is_ht = algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT;
            if (is_ht) config.max_recv_tokens_per_rank = 4;
            ncclEpGroup_t group = nullptr;
            be_late();
            EXPECT_EQ(ncclEpCreateGroup(&group, comm, &config), ncclSuccess) << last_error();
            be_late();
            ncclEpHandle_t handle = nullptr;
            EXPECT_EQ(ncclEpInitHandle(&handle, group, is_ht ? NCCL_EP_LAYOUT_FLAT : NCCL_EP_LAYOUT_EXPERT_MAJOR,
                                       nullptr, 1, nullptr),
                      ncclSuccess)
                << last_error();
            EXPECT_EQ(ncclEpHandleDestroy(handle), ncclSuccess);
            EXPECT_EQ(ncclEpGroupDestroy(group), ncclSuccess);
        }
    });
}

// Rank 0 gives up on rank 1 in the second call, as a group's destruction does, and goes on. Rank 1, which may still be
// looking for the others' parts of the first call, finds every part.
TEST_P(InProcessBackends, FindAllPartsOfARankThatWentOn) {
    run(2, [](ncclComm_t comm, int rank) {
        const auto communicator = communicator_of(comm);
        for (int round = 0; round < 50; ++round) {
            int all[2] = {-1, -1};
            const auto gather = [&](int own, uint64_t timeout_ns) {
                communicator->all_gather(&own, all, sizeof(int), "gather", timeout_ns);
            };
            gather(rank, 100 * kSecond);
            EXPECT_EQ(all[1 - rank], 1 - rank);
            try {
                gather(10 + rank, rank == 0 ? 1 : 100 * kSecond);
                EXPECT_EQ(all[1 - rank], 10 + 1 - rank);
            } catch (const Error& error) {
                EXPECT_EQ(rank, 0) << error.what();
            }
            gather(20 + rank, 100 * kSecond);
            EXPECT_EQ(all[1 - rank], 20 + 1 - rank);
        }
    });
}

TEST_P(InProcessBackends, NoticeThatRanksAreInDifferentCalls) {
    run(2, [](ncclComm_t comm, int rank) {
        const auto communicator = communicator_of(comm);
        const std::string message = message_of(
            [&] { communicator->barrier(rank == 0 ? "group creation" : "window registration", 100 * kSecond); },
            ncclInvalidUsage);
        expect_mentions(message, {"group creation", "window registration", "rank 0", "rank 1"});
    });
}

TEST_P(InProcessBackends, SymmetricMemoryIsOneForAll) {
    constexpr int kRanks = 3;
    run(kRanks, [](ncclComm_t comm, int rank) {
        const auto communicator = communicator_of(comm);
        for (int round = 0; round < 3; ++round) {
            const auto memory = communicator->allocate_symmetric(5000, 100 * kSecond);
            EXPECT_EQ(memory->bytes, 5000u);
            EXPECT_EQ(memory->local, memory->peers.at(rank, 0));
            EXPECT_EQ(reinterpret_cast<uintptr_t>(memory->local) % 4096, 0u);
            EXPECT_EQ(std::accumulate(memory->local, memory->local + 5000, 0,
                                      [](int sum, std::byte byte) { return sum + static_cast<int>(byte); }),
                      0);
            communicator->barrier("zeros seen", 100 * kSecond);
            for (int peer = 0; peer < kRanks; ++peer)
                *memory->peers.at(peer, static_cast<uint64_t>(rank)) = std::byte{9};
            communicator->barrier("all written", 100 * kSecond);
            for (int peer = 0; peer < kRanks; ++peer) EXPECT_EQ(memory->local[peer], std::byte{9});
        }
    });
}

TEST_P(InProcessBackends, SizesMustAgree) {
    run(2, [](ncclComm_t comm, int rank) {
        const auto communicator = communicator_of(comm);
        expect_mentions(message_of([&] { communicator->allocate_symmetric(rank == 0 ? 64 : 128, 100 * kSecond); },
                                   ncclInvalidArgument),
                        {"rank 1", "128", "64"});
        char memory[16];
        ncclWindow_t window = nullptr;
        EXPECT_EQ(crossdockCommWindowRegister(comm, memory, rank == 0 ? 8 : 16, &window, 0), ncclInvalidArgument);
        EXPECT_EQ(window, nullptr);
    });
}

TEST_P(InProcessBackends, WindowsReachTheMemoryOfAllRanks) {
    constexpr int kRanks = 3;
    run(kRanks, [](ncclComm_t comm, int rank) {
        std::vector<int> memory(kRanks, -1);  // any memory will do
        ncclWindow_t window = nullptr;
        ASSERT_EQ(crossdockCommWindowRegister(comm, memory.data(), sizeof(int) * kRanks, &window, 0), ncclSuccess);
        const auto communicator = communicator_of(comm);
        const WindowView view = communicator->window(window);
        EXPECT_EQ(view.bytes, sizeof(int) * kRanks);
        EXPECT_EQ(static_cast<void*>(view.local), memory.data());
        for (int peer = 0; peer < kRanks; ++peer) {
            std::memcpy(view.peers.at(peer, sizeof(int) * static_cast<size_t>(rank)), &rank, sizeof(int));
        }
        ASSERT_EQ(crossdockCommWindowDeregister(comm, window), ncclSuccess);
        EXPECT_EQ(memory, (std::vector<int>{0, 1, 2}));
        message_of([&] { communicator->window(window); }, ncclInvalidArgument);
        EXPECT_EQ(crossdockCommWindowDeregister(comm, window), ncclInvalidArgument);
        message_of([&] { communicator->window(nullptr); }, ncclInvalidArgument);
    });
}

// The executor's warps use NCCL's Device API, as Crossdock's own kernels do (device/network.h): a signal is seen
// after the warp's earlier puts.
TEST_P(InProcessBackends, WarpsPutAndSignalByTheDeviceApi) {
    struct Words {
        uint64_t signal, value, source, copy;
    };
    constexpr int kWarps = 2;
    run(2, [](ncclComm_t comm, int rank) {
        const auto communicator = communicator_of(comm);
        const auto memory = communicator->allocate_symmetric(kWarps * sizeof(Words), 100 * kSecond);
        const NetworkHandle network = communicator->network_of(*memory);
        const auto window = static_cast<ncclWindow_t>(network.window);
        LaunchShape shape;
        shape.warps_per_block = kWarps;
        communicator->runtime().cpu_executor()->run(shape, [&](Warp& warp) {
            const size_t first = static_cast<size_t>(warp.warp_idx) * sizeof(Words);
            Words& words = *reinterpret_cast<Words*>(network.local + first);
            words.source = static_cast<uint64_t>(10 * rank + warp.warp_idx);
            crossdockGinOpen(0, 0, {});
            crossdockPut put = {};
            put.team = {2, rank, 1};
            put.peer = 1 - rank;
            put.target = put.source = window;
            put.target_offset = first + offsetof(Words, copy);
            put.source_offset = first + offsetof(Words, source);
            put.bytes = sizeof(uint64_t);
            crossdockGinPut(&put);
            put.source = nullptr;
            put.value = 7;
            put.target_offset = first + offsetof(Words, value);
            put.remote = {crossdockSignalAdd, true, 0, 3, window, first + offsetof(Words, signal)};
            crossdockGinPut(&put);
            while (__atomic_load_n(&words.signal, __ATOMIC_ACQUIRE) == 0) warp.pause(UINT64_MAX);
            EXPECT_EQ(words.signal, 3u);
            EXPECT_EQ(words.value, 7u);
            EXPECT_EQ(words.copy, static_cast<uint64_t>(10 * (1 - rank) + warp.warp_idx));
            crossdockGinFlush(0, 0, {});
            words.source = 99;  // only now
        });
        communicator->barrier("the test's end", 100 * kSecond);
    });
    expect_mentions(message_of([] { crossdockGinOpen(0, 0, {}); }, ncclInvalidUsage), {"outside"});
}

TEST(CpuCommunicators, AreRefusedAfterTheirEnd) {
    ncclComm_t comm = nullptr;
    ASSERT_EQ(crossdockCommInitAll(&comm, 1), ncclSuccess);
    ASSERT_EQ(crossdockCommBarrier(comm), ncclSuccess);
    const auto still_in_use = communicator_of(comm);
    ASSERT_EQ(crossdockCommDestroy(comm), ncclSuccess);
    EXPECT_EQ(crossdockCommDestroy(comm), ncclInvalidArgument);
    expect_mentions(last_error(), {"destroyed"});
    int rank = 77;
    EXPECT_EQ(crossdockCommUserRank(comm, &rank), ncclInvalidArgument);
    EXPECT_EQ(rank, 77);
    ncclComm_t other = nullptr;
    ASSERT_EQ(crossdockCommInitAll(&other, 1), ncclSuccess);
    EXPECT_NE(other, comm);
    EXPECT_EQ(crossdockCommBarrier(comm), ncclInvalidArgument);
    EXPECT_NO_THROW(still_in_use->barrier("a group that outlives the handle", kSecond));
    EXPECT_EQ(crossdockCommDestroy(other), ncclSuccess);
    EXPECT_EQ(crossdockCommDestroy(nullptr), ncclInvalidArgument);
}

TEST(CpuCommunicators, RefuseBadArguments) {
    ncclComm_t comm = nullptr;
    EXPECT_EQ(crossdockCommInitAll(nullptr, 1), ncclInvalidArgument);
    EXPECT_EQ(crossdockCommInitAll(&comm, 0), ncclInvalidArgument);
    EXPECT_EQ(crossdockCommInitAll(&comm, 4097), ncclInvalidArgument);
    expect_mentions(last_error(), {"num_ranks", "4097", "1..4096"});
    EXPECT_EQ(comm, nullptr);
    ASSERT_EQ(crossdockCommInitAll(&comm, 1), ncclSuccess);
    EXPECT_EQ(crossdockCommUserRank(comm, nullptr), ncclInvalidArgument);
    EXPECT_EQ(crossdockCommCount(comm, nullptr), ncclInvalidArgument);
    EXPECT_EQ(crossdockCommIsCpu(comm, nullptr), ncclInvalidArgument);
    EXPECT_EQ(crossdockCommAllGather(comm, nullptr, nullptr, 8), ncclInvalidArgument);
    EXPECT_EQ(crossdockCommAllGather(comm, nullptr, nullptr, 0), ncclSuccess);
    char memory[8];
    ncclWindow_t window = nullptr;
    EXPECT_EQ(crossdockCommWindowRegister(comm, nullptr, 8, &window, 0), ncclInvalidArgument);
    EXPECT_EQ(crossdockCommWindowRegister(comm, memory, 0, &window, 0), ncclInvalidArgument);
    EXPECT_EQ(crossdockCommWindowRegister(comm, memory, 8, nullptr, 0), ncclInvalidArgument);
    EXPECT_EQ(crossdockCommWindowRegister(comm, memory, 8, &window, 1), ncclInvalidArgument);
    EXPECT_EQ(crossdockCommDestroy(comm), ncclSuccess);

    void* allocated = memory;
    EXPECT_EQ(crossdockMemAlloc(nullptr, 8), ncclInvalidArgument);
    EXPECT_EQ(crossdockMemAlloc(&allocated, 0), ncclInvalidArgument);
    EXPECT_EQ(crossdockMemAlloc(&allocated, SIZE_MAX), ncclSystemError);
    EXPECT_EQ(crossdockMemAlloc(&allocated, size_t{1} << 60), ncclSystemError);
    EXPECT_EQ(allocated, memory);
    EXPECT_EQ(crossdockMemFree(memory), ncclInvalidArgument);
    EXPECT_EQ(crossdockMemFree(nullptr), ncclSuccess);
    ASSERT_EQ(crossdockMemAlloc(&allocated, 10), ncclSuccess);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(allocated) % 4096, 0u);
    EXPECT_EQ(crossdockMemFree(allocated), ncclSuccess);
    EXPECT_EQ(crossdockMemFree(allocated), ncclInvalidArgument);
}

TEST(RunSimulation, RefusesBadConfigurations) {
    const auto program = [](ncclComm_t, int, void* count) { ++*static_cast<int*>(count); };
    int num_runs = 0;
    uint64_t num_steps = 0;
    crossdockSimulationConfig_t config = CROSSDOCK_SIMULATION_CONFIG_INIT;
    EXPECT_EQ(crossdockRunSimulation(0, nullptr, program, &num_runs, nullptr), ncclInvalidArgument);
    EXPECT_EQ(crossdockRunSimulation(2, nullptr, nullptr, &num_runs, nullptr), ncclInvalidArgument);
    config.killed_rank = 2;
    EXPECT_EQ(crossdockRunSimulation(2, &config, program, &num_runs, nullptr), ncclInvalidArgument);
    expect_mentions(last_error(), {"killed_rank", "-1..1"});
    config = CROSSDOCK_SIMULATION_CONFIG_INIT;
    config.magic = 1;
    EXPECT_EQ(crossdockRunSimulation(2, &config, program, &num_runs, nullptr), ncclInvalidArgument);
    config = CROSSDOCK_SIMULATION_CONFIG_INIT;
    config.cut_rank = -2;
    EXPECT_EQ(crossdockRunSimulation(2, &config, program, &num_runs, nullptr), ncclInvalidArgument);
    expect_mentions(last_error(), {"cut_rank", "-1..1"});
    config = CROSSDOCK_SIMULATION_CONFIG_INIT;
    config.are_processes = 2;
    EXPECT_EQ(crossdockRunSimulation(2, &config, program, &num_runs, nullptr), ncclInvalidArgument);
    expect_mentions(last_error(), {"are_processes is 2", "0, 1"});
    EXPECT_EQ(num_runs, 0);
    EXPECT_EQ(crossdockRunSimulation(2, nullptr, program, &num_runs, &num_steps), ncclSuccess);
    EXPECT_EQ(num_runs, 2);
    EXPECT_GE(num_steps, 2u);
}

TEST(RunSimulation, CommunicatorsEndWithTheRun) {
    ncclComm_t escaped = nullptr;
    std::shared_ptr<Communicator> kept;
    run_simulation(2, {}, [&](ncclComm_t comm, int rank) {
        if (rank != 0) return;
        escaped = comm;
        kept = communicator_of(comm);
    });
    EXPECT_EQ(crossdockCommBarrier(escaped), ncclInvalidArgument);
    expect_mentions(message_of([&] { kept->barrier("too late", kSecond); }, ncclInvalidUsage), {"outside"});
}

TEST(RunSimulation, AKilledRanksCallsFailAndItsPeersNameIt) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
        int num_failed = 0;
        run_simulation(3, {.seed = seed, .killed_rank = 1, .killed_at_step = 30 + seed},
                       [&](ncclComm_t comm, int rank) {
                           ncclResult_t result = ncclSuccess;
                           for (int round = 0; round < 100 && result == ncclSuccess; ++round)
                               result = crossdockCommBarrier(comm);
                           EXPECT_EQ(result, ncclRemoteError);
                           if (rank == 1) {
                               expect_mentions(last_error(), {"killed"});
                               EXPECT_TRUE(communicator_of(comm)->is_killed());
                           }
                           ++num_failed;
                       });
        EXPECT_EQ(num_failed, 3);
    }
}

// Ranks that are as processes start in any order, and none goes on before all have.
TEST(RunSimulation, RanksAsProcessesStartLateAndJoin) {
    std::set<int> first_ranks;
    for (uint64_t seed = 0; seed < 20; ++seed) {
        std::vector<int> order;
        const auto run = [&] {
            return run_simulation(3, {.seed = seed, .are_processes = true}, [&](ncclComm_t comm, int rank) {
                order.push_back(rank);
                EXPECT_EQ(crossdockCommBarrier(comm), ncclSuccess) << last_error();
            });
        };
        const SimulationRun once = run(), again = run();
        EXPECT_EQ(once.trace_hash, again.trace_hash);
        EXPECT_TRUE(std::equal(order.begin(), order.begin() + 3, order.begin() + 3)) << "seed " << seed;
        first_ranks.insert(order[0]);
    }
    EXPECT_EQ(first_ranks.size(), 3u);
}

// A rank that is killed before it has joined never runs; the others are told for whom they have waited, once their time
// is up, and those that give up first are not named.
TEST(RunSimulation, ARankKilledBeforeItHasJoinedIsNamed) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
        int num_runs = 0;
        run_simulation(3, {.seed = seed, .killed_rank = 1, .killed_at_step = 0, .are_processes = true},
                       [&](ncclComm_t comm, int rank) {
                           ++num_runs;
                           EXPECT_EQ(comm, nullptr);
                           expect_mentions(last_error(), {fmt::format("rank {} timed out after 60000 ms", rank),
                                                          "waiting for ranks 1 to join"});
                       });
        EXPECT_EQ(num_runs, 2);
    }
}

// A rank whose program has returned has ended, and is named at once by those that wait for it, however they learn of
// it.
TEST(RunSimulation, ARankWhoseProgramHasReturnedHasEnded) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
        int num_told = 0;
        run_simulation(4, {.seed = seed, .are_processes = true}, [&](ncclComm_t comm, int rank) {
            if (rank == 2) return;
            EXPECT_EQ(crossdockCommBarrier(comm), ncclRemoteError);
            expect_mentions(last_error(), {"lost rank 2: its process has ended"});
            ++num_told;
        });
        EXPECT_EQ(num_told, 3);
    }
}

}  // namespace
}  // namespace crossdock::cpu
