// SPDX-License-Identifier: Apache-2.0
// The tags of lines: where one is awaited, bytes of an earlier plain row may lie, which must not be taken for it.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "device/numeric.h"
#include "kernels/ll/line_rows.h"

namespace crossdock {
namespace {

constexpr uint64_t kLastEpoch = (uint64_t{1} << 40) - 1;

std::vector<uint64_t> some_epochs() {
    std::vector<uint64_t> epochs{kLastEpoch - 1, kLastEpoch};
    for (uint64_t epoch = 1; epoch < 70000; ++epoch) epochs.push_back(epoch);
    for (uint64_t epoch = 1; epoch < kLastEpoch; epoch *= 3) epochs.push_back(epoch);
    return epochs;
}

TEST(LineTags, SayEpochAndContent) {
    for (const uint64_t epoch : some_epochs()) {
        for (const uint64_t content : {0, 1, 255}) {
            const uint64_t tag = line_tag(epoch, content);
            ASSERT_EQ(line_epoch(tag), epoch);
            ASSERT_EQ(line_content(tag), content);
        }
    }
}

TEST(LineTags, AreNoNumbersOfAnyFormat) {
    for (const uint64_t epoch : some_epochs()) {
        const uint64_t tag = line_tag(epoch, 0);
        ASSERT_TRUE(std::isnan(std::bit_cast<float>(static_cast<uint32_t>(tag >> 32))));
        ASSERT_TRUE(std::isnan(element_of<DType::kBf16>(tag, 3)));
        ASSERT_TRUE(std::isnan(element_of<DType::kF16>(tag, 3)));
        ASSERT_EQ(tag >> 48, 0xFFFF) << "two NaNs of e4m3";
    }
}

// Zeroed memory, and rows that hold what announcing words hold.
TEST(LineTags, AreNoAnnouncingWords) {
    ASSERT_GT(line_epoch(0), kLastEpoch);
    for (uint64_t epoch = 1; epoch < 70000; ++epoch) {
        ASSERT_GT(line_epoch(pack_word(epoch, 0)), kLastEpoch);
        ASSERT_GT(line_epoch(epoch), kLastEpoch);
    }
}

}  // namespace
}  // namespace crossdock
