// SPDX-License-Identifier: Apache-2.0
#include "gin/descriptor_queue.h"

#include <thread>
#include <vector>

namespace crossdock::gin {
namespace {

Descriptor numbered(uint64_t number) {
    Descriptor descriptor;
    descriptor.bytes = number;
    descriptor.increase = ~number;
    return descriptor;
}

// A queue takes as many as it is deep, gives them back in order, and has room again, lap after lap.
TEST(DescriptorQueue, IsBoundedAndInOrder) {
    DescriptorQueue queue(3);
    EXPECT_EQ(queue.depth(), 4u);
    EXPECT_EQ(queue.front(), nullptr);
    for (uint64_t lap = 0; lap < 5; ++lap) {
        for (uint64_t i = 0; i < 4; ++i) EXPECT_TRUE(queue.try_push(numbered(4 * lap + i)));
        EXPECT_FALSE(queue.try_push(numbered(99)));
        EXPECT_EQ(queue.num_pushed(), 4 * lap + 4);
        for (uint64_t i = 0; i < 4; ++i) {
            ASSERT_NE(queue.front(), nullptr);
            EXPECT_EQ(queue.front()->bytes, 4 * lap + i);
            queue.pop();
        }
        EXPECT_EQ(queue.front(), nullptr);
    }
}

// What several threads push comes out whole, once, and of each thread in its order.
TEST(DescriptorQueue, TakesFromSeveralThreads) {
    constexpr uint64_t kThreads = 3, kEach = 20'000;
    DescriptorQueue queue(8);
    std::vector<std::thread> threads;
    for (uint64_t thread = 0; thread < kThreads; ++thread) {
        threads.emplace_back([&queue, thread] {
            for (uint64_t i = 0; i < kEach; ++i) {
                while (!queue.try_push(numbered(thread << 32 | i))) std::this_thread::yield();
            }
        });
    }
    std::vector<uint64_t> next(kThreads);
    for (uint64_t popped = 0; popped < kThreads * kEach;) {
        const Descriptor* front = queue.front();
        if (front == nullptr) {
            std::this_thread::yield();
            continue;
        }
        const uint64_t thread = front->bytes >> 32;
        ASSERT_LT(thread, kThreads);
        EXPECT_EQ(front->bytes & UINT32_MAX, next[thread]++);
        EXPECT_EQ(front->increase, ~front->bytes);
        queue.pop();
        ++popped;
    }
    for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace crossdock::gin
