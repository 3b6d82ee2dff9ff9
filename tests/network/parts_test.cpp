// SPDX-License-Identifier: Apache-2.0
// The small parts: lanes and staging rings.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "network/lane.h"
#include "network/staging.h"

namespace crossdock::network {
namespace {

// Frames land in any order; a range has landed when each of its frames has; none lands twice.
TEST(Lane, KnowsWhatHasLanded) {
    std::mt19937 random(7);
    for (int round = 0; round < 200; ++round) {
        std::vector<uint64_t> order(40);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        Lane lane;
        std::vector<bool> landed(order.size(), false);
        for (const uint64_t number : order) {
            ASSERT_TRUE(lane.land(number));
            ASSERT_FALSE(lane.land(number));
            landed[number] = true;
            const uint64_t first = random() % order.size();
            const uint64_t last = first + random() % (order.size() - first);
            const auto from = landed.begin() + static_cast<std::ptrdiff_t>(first);
            const bool all = std::all_of(from, landed.begin() + static_cast<std::ptrdiff_t>(last) + 1,
                                         [](bool each) { return each; });
            ASSERT_EQ(lane.has_landed(first, last), all);
        }
    }
    Lane lane;
    EXPECT_FALSE(lane.land(uint64_t{1} << 40));
}

// Pieces never overlap, and all memory is reused.
TEST(StagingRing, PiecesAreApart) {
    std::vector<std::byte> memory(1 << 16);
    StagingRing ring(memory);
    std::mt19937 random(3);
    struct Piece {
        std::byte* first;
        uint64_t bytes;
    };
    std::vector<Piece> pieces;
    for (int step = 0; step < 20'000; ++step) {
        const uint64_t bytes = 1 + random() % 9000;
        std::byte* first = random() % 2 == 0 ? ring.take(bytes) : nullptr;
        if (first != nullptr) {
            ASSERT_GE(first, memory.data());
            ASSERT_LE(first + bytes, memory.data() + memory.size());
            for (const Piece& other : pieces) {
                ASSERT_TRUE(first + bytes <= other.first || other.first + other.bytes <= first);
            }
            pieces.push_back({first, bytes});
        } else if (!pieces.empty()) {
            const size_t which = random() % pieces.size();
            ring.give_back(pieces[which].first);
            pieces.erase(pieces.begin() + static_cast<std::ptrdiff_t>(which));
        }
    }
    for (const Piece& piece : pieces) ring.give_back(piece.first);
    EXPECT_NE(ring.take(memory.size()), nullptr);
    EXPECT_EQ(ring.take(1), nullptr);
}

}  // namespace
}  // namespace crossdock::network
