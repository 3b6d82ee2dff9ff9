// SPDX-License-Identifier: Apache-2.0
// What threads do while they wait for others of their rank, or for other ranks.
#include <gtest/gtest.h>
#include <sched.h>

#include <string>
#include <thread>

#include "crossdock.h"
#include "crossdock/device/entry.hpp"
#include "device_api/kernel_thread.h"
#include "runtime/cpu/idle_backoff.h"

namespace crossdock {
namespace {

// Two threads of a rank that is bound to one core do not spin, however many cores the machine has.
TEST(IdleWaits, ThreadsOfARankThatIsBoundToACoreDoNotSpin) {
    std::thread([] {
        cpu_set_t one_core;
        CPU_ZERO(&one_core);
        CPU_SET(sched_getcpu(), &one_core);
        ASSERT_EQ(sched_setaffinity(0, sizeof(one_core), &one_core), 0);
        EXPECT_EQ(cpu::IdleBackoff::spins_for(1, 2), 0);
        EXPECT_GT(cpu::IdleBackoff::spins_for(1, 1), 0);
    }).join();
}

// Nor do more threads than the machine has cores.
TEST(IdleWaits, ThreadsWithoutACoreOfTheirOwnDoNotSpin) {
    const auto num_cores = static_cast<int>(std::thread::hardware_concurrency());
    EXPECT_EQ(cpu::IdleBackoff::spins_for(num_cores, 2), 0);
    EXPECT_EQ(cpu::IdleBackoff::spins_for(num_cores + 1), 0);
    EXPECT_GT(cpu::IdleBackoff::spins_for(num_cores), 0);
}

// A kernel's wait writes its description only when it expires: that takes longer than a poll.
TEST(IdleWaits, AKernelsWaitDescribesItselfOnlyWhenItExpires) {
    struct Counts {
        int polls = 0, descriptions = 0;
    } counts;
    crossdockLaunchArguments launch = {};
    for (int i = 0; i < 3; ++i) launch.grid[i] = launch.block[i] = 1;
    launch.enter = [](const crossdockThread*) {};
    launch.context = &counts;
    launch.body = [](void* context) {
        auto& its_counts = *static_cast<Counts*>(context);
        device_api::KernelThread::current().wait([&] { return ++its_counts.polls == 1000; },
                                                 [&] {
                                                     ++its_counts.descriptions;
                                                     return std::string("the thousandth poll");
                                                 });
    };
    ncclComm_t comm = nullptr;
    ASSERT_EQ(crossdockCommInitAll(&comm, 1), ncclSuccess);
    EXPECT_EQ(crossdockLaunchKernel(comm, &launch), ncclSuccess) << crossdockGetLastError();
    EXPECT_EQ(crossdockCommDestroy(comm), ncclSuccess);
    EXPECT_EQ(counts.polls, 1000);
    EXPECT_EQ(counts.descriptions, 0);
}

}  // namespace
}  // namespace crossdock
