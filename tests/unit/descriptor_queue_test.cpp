// SPDX-License-Identifier: Apache-2.0
#include "device_api/descriptor_queue.h"

#include <thread>
#include <vector>

namespace crossdock::device_api {
namespace {

Descriptor numbered(uint64_t number) {
    Descriptor descriptor;
    descriptor.bytes = number;
    descriptor.increase = ~number;
    return descriptor;
}

// A queue takes as many as it is deep, gives them back in order, and has room again, lap after lap.
TEST(DescriptorQueue, IsBoundedAndInOrder) {
    for (const auto& [asked, depth] : {std::pair<size_t, uint64_t>{1, 1}, {2, 2}, {3, 4}, {8, 8}}) {
        DescriptorQueue queue(asked);
        EXPECT_EQ(queue.depth(), depth);
        EXPECT_EQ(queue.front(), nullptr);
        for (uint64_t lap = 0; lap < 5; ++lap) {
            for (uint64_t i = 0; i < depth; ++i) ASSERT_TRUE(queue.try_push(numbered(depth * lap + i))) << asked;
            ASSERT_FALSE(queue.try_push(numbered(99))) << asked;
            EXPECT_EQ(queue.num_pushed(), depth * lap + depth);
            for (uint64_t i = 0; i < depth; ++i) {
                ASSERT_NE(queue.front(), nullptr) << asked;
                EXPECT_EQ(queue.front()->bytes, depth * lap + i) << asked;
                queue.pop();
            }
            EXPECT_EQ(queue.front(), nullptr) << asked;
        }
    }
}

// What several threads push comes out whole, once, and of each thread in its order.
void take_from_several_threads(size_t depth) {
    constexpr uint64_t kThreads = 3, kEach = 10'000;
    DescriptorQueue queue(depth);
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
TEST(DescriptorQueue, TakesFromSeveralThreads) {
    for (const size_t depth : {1, 8}) take_from_several_threads(depth);
}

}  // namespace
}  // namespace crossdock::device_api
