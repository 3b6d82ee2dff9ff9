// SPDX-License-Identifier: Apache-2.0
// Which buffer an operation of low latency uses.
#include <gtest/gtest.h>

#include <vector>

#include "kernels/ll/operation.h"

namespace crossdock {
namespace {

// Of so many operations one after the other, with these buffers held; absent: of groups with fewer buffers.
std::vector<int> chosen(uint32_t held, uint32_t absent, int num) {
    LlCommon common{};
    common.offsets.absent_buffers = absent;
    LlClock clock{1, 0, held};
    std::vector<int> buffers;
    for (int i = 0; i < num; ++i) {
        buffers.push_back(choose_buffer(common, clock));
        if (buffers.back() >= 0) clock.latest_buffer = static_cast<uint32_t>(buffers.back());
    }
    return buffers;
}

// While none is held, two take turns, also where there are no others.
TEST(LlBuffers, TwoTakeTurns) {
    EXPECT_EQ(chosen(0, 0, 4), (std::vector{1, 0, 1, 0}));
    EXPECT_EQ(chosen(0, 0b100, 4), (std::vector{1, 0, 1, 0}));
}

// Held ones are left out, and two others take turns as long as there are two.
TEST(LlBuffers, HeldOnesAreLeftOut) {
    EXPECT_EQ(chosen(0b001, 0, 4), (std::vector{1, 2, 1, 2}));
    EXPECT_EQ(chosen(0b010, 0, 4), (std::vector{2, 0, 2, 0}));
    EXPECT_EQ(chosen(0b011, 0, 2), (std::vector{2, 2}));
    EXPECT_EQ(chosen(0b001, 0b100, 2), (std::vector{1, 1}));
}

// Where all are held there is none.
TEST(LlBuffers, ThereIsNoneWhereAllAreHeld) {
    EXPECT_EQ(chosen(0b111, 0, 1), std::vector{-1});
    EXPECT_EQ(chosen(0b011, 0b100, 1), std::vector{-1});
}

}  // namespace
}  // namespace crossdock
