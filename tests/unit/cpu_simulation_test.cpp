// SPDX-License-Identifier: Apache-2.0
// In the simulation one seed is one run, copies land late and in any order, time jumps instead of passing, a
// killed rank falls silent, deadlocks end with a message, and the checker sees what breaks the protocol.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <initializer_list>
#include <set>
#include <string>
#include <vector>

#include "core/error.h"
#include "fabric/communicator.h"
#include "fabric/cpu/in_process_communicator.h"
#include "messages.h"
#include "runtime/cpu/executor.h"
#include "runtime/cpu/local_executor.h"
#include "runtime/cpu/sanitizer.h"
#include "runtime/cpu/simulation.h"

namespace crossdock::cpu {
namespace {

constexpr uint64_t kSecond = 1'000'000'000;

// Rank 0 copies a row into rank 1's memory and raises a flag; rank 1 waits for the flag and checks the row.
struct OneRow {
    static constexpr int kBytes = 64;
    std::byte source[kBytes];
    std::byte target[kBytes] = {};
    uint64_t flag = 0;
    bool arrived_whole = false;
    OneRow() { std::memset(source, 7, kBytes); }

    void run(Simulation& simulation, int rank, bool waits) {
        simulation.executor(rank).run({1, 2, 64}, [&](Warp& warp) {
            if (warp.warp_idx != 0) return;
            if (rank == 0) {
                for (int at = 0; at < kBytes; at += 8) warp.copy_async(target + at, source + at, 8);
                if (waits) warp.wait_copies(0);
                warp.scheduling_point();
                flag = 1;
            } else {
                while (flag == 0) warp.pause(UINT64_MAX);
                arrived_whole = std::memcmp(target, source, kBytes) == 0;
            }
        });
    }
};

// Races that ThreadSanitizer finds in kernels, though one thread runs all of their warps.
#if defined(CROSSDOCK_TSAN)

constexpr int kTsanExitCode = 66;

// A warp writes into the block's memory, another one reads.
void share(Warp& warp, bool meets) {
    if (warp.warp_idx == 0) warp.shared_memory[0] = std::byte{1};
    if (meets) warp.meet(0, warp.num_warps);
    if (warp.warp_idx == 1) EXPECT_EQ(warp.shared_memory[0], std::byte{1});
}

// A rank copies a row into the other's memory, which reads it when a flag says so.
void send_row(Simulation& simulation, bool waits) {
    std::byte source[64] = {}, target[64] = {};
    uint64_t flag = 0;
    simulation.run([&](int rank) {
        simulation.executor(rank).run({1, 1, 64}, [&](Warp& warp) {
            if (rank == 0) {
                warp.copy_async(target, source, sizeof(target));
                if (waits) warp.wait_copies(0);
                __atomic_store_n(&flag, 1, __ATOMIC_RELEASE);
            } else {
                while (__atomic_load_n(&flag, __ATOMIC_ACQUIRE) == 0) warp.pause(UINT64_MAX);
                EXPECT_EQ(target[63], std::byte{0});
            }
        });
    });
}

// A forked process is not watched, one of its own is.
class Races : public ::testing::Test {
  protected:
    void SetUp() override { ::testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

TEST_F(Races, AForgottenBarrierIsFound) {
    LocalExecutor executor(1);
    executor.run({1, 2, 64}, [](Warp& warp) { share(warp, true); });
    EXPECT_EXIT(executor.run({1, 2, 64}, [](Warp& warp) { share(warp, false); }),
                ::testing::ExitedWithCode(kTsanExitCode), "data race");
}

TEST_F(Races, AForgottenBarrierIsFoundInTheSimulation) {
    const auto run = [](bool meets) {
        Simulation simulation(1, {});
        simulation.run([&](int rank) {
            simulation.executor(rank).run({1, 2, 64}, [&](Warp& warp) { share(warp, meets); });
        });
    };
    run(true);
    EXPECT_EXIT(run(false), ::testing::ExitedWithCode(kTsanExitCode), "data race");
}

TEST_F(Races, AFlagBeforeItsDataIsFound) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
        Simulation simulation(2, {.seed = seed});
        send_row(simulation, true);
    }
    Simulation simulation(2, {});
    EXPECT_EXIT(send_row(simulation, false), ::testing::ExitedWithCode(kTsanExitCode), "data race");
}

#endif

TEST(Simulation, CopiesThatWereAwaitedHaveLanded) {
    for (uint64_t seed = 0; seed < 200; ++seed) {
        OneRow row;
        Simulation simulation(2, {.seed = seed});
        simulation.run([&](int rank) { row.run(simulation, rank, true); });
        EXPECT_TRUE(row.arrived_whole) << "seed " << seed;
    }
}

TEST(Simulation, CopiesThatWereNotAwaitedLandTooLate) {
    int num_torn = 0;
    for (uint64_t seed = 0; seed < 200; ++seed) {
        OneRow row;
        Simulation simulation(2, {.seed = seed});
        simulation.run([&](int rank) { row.run(simulation, rank, false); });
        num_torn += row.arrived_whole ? 0 : 1;
        EXPECT_EQ(std::memcmp(row.target, row.source, OneRow::kBytes), 0) << "nothing is lost in the end";
    }
    EXPECT_GT(num_torn, 100);
}

TEST(Simulation, WaitsForAllButTheLatestCopies) {
    for (uint64_t seed = 0; seed < 50; ++seed) {
        Simulation simulation(1, {.seed = seed});
        simulation.run([&](int) {
            std::vector<uint64_t> source(16, 1);
            std::vector<uint64_t> target(16, 0);
            simulation.executor(0).run({1, 1, 0}, [&](Warp& warp) {
                for (size_t i = 0; i < 16; ++i) {
                    warp.copy_async(&target[i], &source[i], 8);
                    warp.wait_copies(3);
                    for (size_t earlier = 0; earlier + 3 <= i; ++earlier) EXPECT_EQ(target[earlier], 1u);
                }
            });
        });
    }
}

struct Traced {
    uint64_t hash;
    uint64_t steps;
    std::vector<int> order;
    bool operator==(const Traced&) const = default;
};

Traced traced_run(uint64_t seed) {
    Simulation simulation(4, {.seed = seed});
    Traced traced{};
    std::vector<uint64_t> data(64);
    simulation.run([&](int rank) {
        for (int round = 0; round < 5; ++round) {
            simulation.executor(rank).run({2, 3, 128}, [&](Warp& warp) {
                warp.scheduling_point();
                traced.order.push_back(rank * 100 + warp.block_idx * 10 + warp.warp_idx);
                warp.copy_async(&data[static_cast<size_t>(rank)], &data[static_cast<size_t>(rank + 8)], 8);
                warp.meet(0, warp.num_warps);
                warp.wait_copies(0);
            });
        }
    });
    traced.hash = simulation.trace_hash();
    traced.steps = simulation.num_steps();
    return traced;
}

TEST(Simulation, OneSeedIsOneRun) {
    std::set<uint64_t> hashes;
    for (uint64_t seed = 0; seed < 20; ++seed) {
        const Traced first = traced_run(seed);
        const std::vector<int> moves_the_heap(1000 + seed);
        EXPECT_EQ(first, traced_run(seed)) << "seed " << seed;
        hashes.insert(first.hash);
    }
    EXPECT_EQ(hashes.size(), 20u);
}

TEST(Simulation, ALongTimeoutCostsNoTime) {
    Simulation simulation(3, {});
    simulation.run([&](int rank) {
        simulation.executor(rank).run({1, 4, 0}, [&](Warp& warp) {
            const uint64_t start_ns = warp.now_ns();
            const uint64_t deadline_ns = start_ns + static_cast<uint64_t>(100 + rank) * kSecond;
            while (warp.now_ns() < deadline_ns) warp.pause(deadline_ns);
            EXPECT_LT(warp.now_ns(), deadline_ns + kSecond / 1000);
        });
    });
    EXPECT_LT(simulation.num_steps(), 100'000u);
}

// Progress by stores without note_progress() must not look like idleness: no deadline may pass.
TEST(Simulation, TimeDoesNotJumpWhileATaskGoesOn) {
    for (uint64_t seed = 0; seed < 50; ++seed) {
        uint64_t turn = 0;
        Simulation simulation(4, {.seed = seed});
        simulation.run([&](int rank) {
            simulation.executor(rank).run({1, 1, 0}, [&](Warp& warp) {
                const uint64_t deadline_ns = warp.now_ns() + kSecond;
                for (uint64_t mine = static_cast<uint64_t>(rank); mine < 40; mine += 4) {
                    while (turn != mine) {
                        ASSERT_LT(warp.now_ns(), deadline_ns);
                        warp.pause(deadline_ns);
                    }
                    warp.scheduling_point();
                    turn = mine + 1;
                }
            });
        });
        EXPECT_EQ(turn, 40u);
    }
}

// A deadline that passes during the others' last polls wakes its task, not that of the next deadline.
TEST(Simulation, NoDeadlineIsPassedOver) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
        Simulation simulation(4, {.seed = seed});
        simulation.run([&](int rank) {
            simulation.executor(rank).run({1, 1, 0}, [&](Warp& warp) {
                const uint64_t end_ns = warp.now_ns() + kSecond;
                for (uint64_t delay_ns = 20; rank == 1 && delay_ns < 2000; delay_ns += 10) {
                    const uint64_t deadline_ns = warp.now_ns() + delay_ns;
                    while (warp.now_ns() < deadline_ns) warp.pause(deadline_ns);
                    ASSERT_LT(warp.now_ns(), deadline_ns + kSecond / 1000);
                }
                while (rank != 1 && warp.now_ns() < end_ns) warp.pause(end_ns);
            });
        });
    }
}

TEST(Simulation, ADeadlockEndsWithAMessage) {
    Simulation simulation(3, {.seed = 11});
    const std::string message = message_of(
        [&] {
            simulation.run([&](int rank) {
                simulation.executor(rank).run({1, 2, 0}, [&](Warp& warp) {
                    if (rank == 1 && warp.warp_idx == 0) warp.meet(0, warp.num_warps);
                    while (rank == 2) warp.pause(UINT64_MAX);
                });
            });
        },
        ncclInternalError);
    expect_mentions(message, {"seed 11", "deadlock", "ranks 1, 2"});
}

TEST(Simulation, AKernelsExceptionComesOut) {
    Simulation simulation(2, {});
    const auto program = [&](int rank) {
        simulation.executor(rank).run({1, 3, 0}, [&](Warp& warp) {
            if (rank == 1 && warp.warp_idx == 1) throw std::runtime_error("warp 1 of rank 1");
        });
    };
    EXPECT_THROW(simulation.run(program), std::runtime_error);
}

TEST(Simulation, AKilledRankFallsSilentAndItsCallsFail) {
    for (uint64_t seed = 0; seed < 30; ++seed) {
        Simulation simulation(2, {.seed = seed, .killed_rank = 1, .killed_at_step = 40});
        uint64_t source = 0;
        uint64_t target = 0;
        uint64_t after_death = 0;
        bool ended = false;
        simulation.run([&](int rank) {
            if (rank == 0) {
                simulation.executor(0).run({1, 1, 0}, [&](Warp& warp) {
                    const uint64_t deadline_ns = warp.now_ns() + kSecond;
                    while (warp.now_ns() < deadline_ns) warp.pause(deadline_ns);
                    EXPECT_FALSE(warp.is_killed());
                });
                return;
            }
            const auto kernel = [&](Warp& warp) {
                for (source = 1; !warp.is_killed(); ++source) {
                    warp.copy_async(&target, &source, 8);
                    warp.wait_copies(0);
                }
                after_death = source + 1000;
                warp.copy_async(&target, &after_death, 8);
                warp.wait_copies(0);
            };
            message_of([&] { simulation.executor(1).run({1, 1, 0}, kernel); }, ncclRemoteError);
            EXPECT_FALSE(simulation.executor(1).wait([] { return false; }, UINT64_MAX));
            expect_mentions(message_of(
                                [&] {
                                    simulation.executor(1).run({1, 1, 0}, [](Warp&) {});
                                },
                                ncclRemoteError),
                            {"rank 1", "killed"});
            ended = true;
        });
        EXPECT_TRUE(ended);
        EXPECT_NE(target, after_death);
    }
}

// ---- The checker, alone
// --------------------------------------------------------------------------------------------------

void run_checked(const std::function<void(ProtocolChecker&, Warp&)>& events, SimulationConfig config = {}) {
    Simulation simulation(2, config);
    simulation.run([&](int rank) {
        if (rank != 0) return;
        simulation.executor(0).run({1, 1, 0}, [&](Warp& warp) { events(*warp.checker(), warp); });
    });
}

TEST(SlotChecker, AcceptsWriteReadWrite) {
    EXPECT_NO_THROW(run_checked([](ProtocolChecker& checker, Warp&) {
        for (uint64_t epoch = 1; epoch < 5; ++epoch) {
            checker.slot_written(1, 0, nullptr, 2, 3, epoch);
            checker.slot_read(0, nullptr, 2, 3, epoch);
            checker.operation_read(0, epoch, 1, 1);
        }
    }));
}

TEST(SlotChecker, SeesASlotWrittenBeforeItIsFree) {
    const auto events = [](ProtocolChecker& checker, Warp&) {
        checker.slot_written(1, 0, nullptr, 2, 3, 4);
        checker.slot_written(1, 0, nullptr, 2, 3, 6);
    };
    expect_mentions(message_of([&] { run_checked(events, {.seed = 77}); }, ncclInternalError),
                    {"seed 77", "rank 1 wrote slot 3 of buffer 2 of rank 0", "epoch 6", "epoch 4"});
}

TEST(SlotChecker, SeesReadsOfWhatWasNotWritten) {
    expect_mentions(message_of([] { run_checked([](ProtocolChecker& c, Warp&) { c.slot_read(0, nullptr, 1, 5, 2); }); },
                               ncclInternalError),
                    {"slot 5", "never written"});
    expect_mentions(message_of(
                        [] {
                            run_checked([](ProtocolChecker& c, Warp&) {
                                c.slot_written(1, 0, nullptr, 1, 5, 1);
                                c.slot_read(0, nullptr, 1, 5, 2);
                            });
                        },
                        ncclInternalError),
                    {"epoch 2", "last wrote it for epoch 1"});
    expect_mentions(message_of(
                        [] {
                            run_checked([](ProtocolChecker& c, Warp&) {
                                c.slot_written(1, 0, nullptr, 1, 5, 1);
                                c.slot_read(0, nullptr, 1, 5, 1);
                                c.slot_read(0, nullptr, 1, 5, 1);
                            });
                        },
                        ncclInternalError),
                    {"twice"});
    expect_mentions(message_of([] { run_checked([](ProtocolChecker& c, Warp&) { c.operation_read(0, 9, 5, 4); }); },
                               ncclInternalError),
                    {"4 rows", "epoch 9", "5 were announced"});
}

TEST(SlotChecker, TellsSeveralGroupsAndGenerationsOfMemoryApart) {
    const int memories[2] = {};
    Simulation simulation(1, {});
    EXPECT_NO_THROW(simulation.run([&](int) {
        SlotChecker& checker = simulation.checker();
        checker.slot_written(0, 0, &memories[0], 2, 3, 1);
        checker.slot_written(0, 0, &memories[1], 2, 3, 1);
        checker.memory_is_new(&memories[0]);
        checker.slot_written(0, 0, &memories[0], 2, 3, 1);
        checker.slot_read(0, &memories[1], 2, 3, 1);
    }));
}

TEST(SlotChecker, AcceptsWhatALossLeavesBehind) {
    EXPECT_NO_THROW(run_checked(
        [](ProtocolChecker& checker, Warp&) {
            checker.slot_written(1, 0, nullptr, 2, 3, 4);
            checker.slot_written(1, 0, nullptr, 2, 3, 6);
            checker.operation_read(0, 6, 5, 4);
        },
        {.killed_rank = 1, .killed_at_step = 0}));
    EXPECT_NO_THROW(run_checked([](ProtocolChecker& checker, Warp& warp) {
        checker.slot_written(1, 0, nullptr, 2, 3, 4);
        warp.pause(warp.now_ns() + 5);
        checker.slot_written(1, 0, nullptr, 2, 3, 6);
    }));
    EXPECT_NO_THROW(run_checked([](ProtocolChecker& checker, Warp&) {
        checker.slot_written(1, 0, nullptr, 2, 3, 4);
        checker.unread_slots_allowed();
        checker.slot_written(1, 0, nullptr, 2, 3, 6);
        checker.slot_read(0, nullptr, 2, 3, 6);
        checker.slot_read(0, nullptr, 2, 3, 6);
    }));
    EXPECT_THROW(run_checked([](ProtocolChecker& checker, Warp&) {
                     checker.unread_slots_allowed();
                     checker.slot_read(0, nullptr, 2, 3, 6);
                 }),
                 Error);
}

}  // namespace
}  // namespace crossdock::cpu
