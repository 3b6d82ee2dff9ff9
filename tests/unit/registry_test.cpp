// SPDX-License-Identifier: Apache-2.0
// Threads that destroy the same object: one gets it.
#include "core/registry.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

#include "nccl_ep.h"

namespace crossdock {
namespace {

TEST(Registry, OneOfManyThreadsRemovesAnObject) {
    constexpr int kThreads = 4;
    constexpr int kRounds = 2000;
    Registry<int> registry("number");
    void* pointer = nullptr;
    std::atomic<int> removed{0};
    std::atomic<int> refused{0};
    std::barrier round(kThreads, [&]() noexcept { pointer = registry.add(std::make_shared<int>(0)); });
    const auto remove = [&] {
        for (int i = 0; i < kRounds; ++i) {
            round.arrive_and_wait();
            try {
                registry.remove(pointer);
                ++removed;
            } catch (const Error& error) {
                EXPECT_EQ(error.code(), ncclInvalidArgument);
                ++refused;
            }
        }
    };
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) threads.emplace_back(remove);
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(removed, kRounds);
    EXPECT_EQ(refused, kRounds * (kThreads - 1));
}

TEST(Tensors, OneOfManyThreadsDestroysADescriptor) {
    constexpr int kTensors = 100000;
    const size_t size = 1;
    std::vector<ncclEpTensor_t*> tensors(kTensors);
    for (ncclEpTensor_t*& tensor : tensors)
        ASSERT_EQ(ncclEpTensorAlloc(&tensor, 1, ncclInt32, &size, nullptr), ncclSuccess);
    std::atomic<int> num_destroyed{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
        threads.emplace_back([&] {
            for (ncclEpTensor_t* tensor : tensors) num_destroyed += ncclEpTensorDestroy(tensor) == ncclSuccess;
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(num_destroyed, kTensors);
}

}  // namespace
}  // namespace crossdock
