// SPDX-License-Identifier: Apache-2.0
// The local executor runs every warp once, its barriers hold, its waits are bounded, and what goes wrong inside a
// kernel comes out.
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "messages.h"
#include "runtime/cpu/idle_backoff.h"
#include "runtime/cpu/local_executor.h"

namespace crossdock::cpu {
namespace {

TEST(LocalExecutor, RunsEveryWarpOnce) {
    LocalExecutor executor(1);
    for (const LaunchShape shape :
         {LaunchShape{1, 1, 64}, LaunchShape{3, 4, 1024}, LaunchShape{1, 8, 0}, LaunchShape{5, 1, 16}}) {
        std::vector<int> runs(static_cast<size_t>(shape.num_blocks * shape.warps_per_block));
        executor.run(shape, [&](Warp& warp) {
            EXPECT_EQ(warp.num_blocks, shape.num_blocks);
            EXPECT_EQ(warp.num_warps, shape.warps_per_block);
            EXPECT_FALSE(warp.is_lazy() || warp.is_killed());
            EXPECT_EQ(reinterpret_cast<uintptr_t>(warp.shared_memory) % 128, 0u);
            ++runs[static_cast<size_t>(warp.block_idx * shape.warps_per_block + warp.warp_idx)];
        });
        EXPECT_EQ(runs, std::vector<int>(runs.size(), 1));
    }
}

TEST(LocalExecutor, BlockBarrierHolds) {
    LocalExecutor executor(1);
    constexpr int kWarps = 6;
    constexpr int kRounds = 50;
    std::atomic<int> arrived[2] = {};
    executor.run({2, kWarps, 64}, [&](Warp& warp) {
        for (int round = 1; round <= kRounds; ++round) {
            if (warp.warp_idx % 2 == 0) warp.pause(0);
            ++arrived[warp.block_idx];
            warp.meet(0, warp.num_warps);
            EXPECT_EQ(arrived[warp.block_idx], round * kWarps);
            warp.meet(0, warp.num_warps);
        }
    });
}

TEST(LocalExecutor, WarpsOfABlockShareMemoryAndBlocksDoNot) {
    LocalExecutor executor(1);
    executor.run({3, 2, 256}, [&](Warp& warp) {
        if (warp.warp_idx == 0) warp.shared_memory[255] = static_cast<std::byte>(warp.block_idx);
        warp.meet(0, warp.num_warps);
        EXPECT_EQ(warp.shared_memory[255], static_cast<std::byte>(warp.block_idx));
    });
}

// Ranks as threads, more of them than cores: all wait for each other, many times.
TEST(LocalExecutor, LaunchesOfManyThreadsWaitForEachOther) {
    constexpr int kRanks = 8;
    constexpr int kRounds = 200;
    LocalExecutor executor(kRanks);
    std::atomic<uint64_t> flags[kRanks] = {};
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
        ranks.emplace_back([&, rank] {
            for (uint64_t round = 1; round <= kRounds; ++round) {
                executor.run({1, 2, 0}, [&](Warp& warp) {
                    if (warp.warp_idx == 0) flags[rank].store(round, std::memory_order_release);
                    for (int peer = warp.warp_idx; peer < kRanks; peer += 2) {
                        while (flags[peer].load(std::memory_order_acquire) < round) warp.pause(UINT64_MAX);
                    }
                });
            }
        });
    }
    for (auto& rank : ranks) rank.join();
    for (const auto& flag : flags) EXPECT_EQ(flag.load(), uint64_t{kRounds});
}

TEST(LocalExecutor, RethrowsAKernelsExceptionAndUnwindsTheOthers) {
    LocalExecutor executor(1);
    for (const bool at_barrier : {false, true}) {
        std::atomic<int> num_unwound = 0;
        struct Counts {
            std::atomic<int>& count;
            ~Counts() { ++count; }
        };
        const auto kernel = [&](Warp& warp) {
            Counts counts{num_unwound};
            if (warp.warp_idx == 2) throw std::runtime_error("warp 2");
            if (at_barrier) warp.meet(0, warp.num_warps);
            for (;;) warp.pause(UINT64_MAX);
        };
        EXPECT_THROW(executor.run({1, 4, 0}, kernel), std::runtime_error);
        EXPECT_EQ(num_unwound, 4);
    }
    EXPECT_THROW(executor.run({1, 1, 0}, [](Warp&) { throw std::runtime_error("alone"); }), std::runtime_error);
}

TEST(LocalExecutor, ABarrierThatCannotCompleteIsAnError) {
    LocalExecutor executor(1);
    const auto kernel = [](Warp& warp) {
        if (warp.warp_idx != 0) warp.meet(0, warp.num_warps);
    };
    expect_mentions(message_of([&] { executor.run({1, 3, 0}, kernel); }, ncclInternalError), {"barrier"});
}

// The destructor of a thread's object launches although what the thread's launches reuse is gone.
TEST(LocalExecutor, RunsAtTheEndOfAThread) {
    static LocalExecutor executor(1);
    static std::atomic<int> num_runs{0};
    struct Last {
        ~Last() {
            for (const int warps : {1, 4, 2}) executor.run({2, warps, 64}, [](Warp&) { ++num_runs; });
        }
    };
    std::thread([] {
        thread_local Last last;
        static_cast<void>(&last);  // made before the executor's
        executor.run({2, 4, 64}, [](Warp&) { ++num_runs; });
    }).join();
    EXPECT_EQ(num_runs, 8 + 2 + 8 + 4);
}

TEST(LocalExecutor, HostWaitsAreBounded) {
    LocalExecutor executor(1);
    const uint64_t start_ns = executor.now_ns();
    EXPECT_FALSE(executor.wait([] { return false; }, start_ns + 5'000'000));
    EXPECT_GE(executor.now_ns() - start_ns, 5'000'000u);
    EXPECT_TRUE(executor.wait([] { return true; }, 0));
    int num_polls = 0;
    EXPECT_TRUE(executor.wait([&] { return ++num_polls == 10; }, UINT64_MAX));
}

TEST(IdleBackoff, DeadlinesFarAwayDoNotWrap) {
    EXPECT_EQ(saturating_add(UINT64_MAX - 1, 5), UINT64_MAX);
    EXPECT_EQ(saturating_add(3, 5), 8u);
}

}  // namespace
}  // namespace crossdock::cpu
