// SPDX-License-Identifier: Apache-2.0
// What several numbers are packed into gives each of them back, at the largest values that it may have.
#include <gtest/gtest.h>

#include "kernels/ll/arguments.h"

namespace crossdock {
namespace {

TEST(Packings, TheLowLatencyClockHoldsEveryBuffer) {
    constexpr uint64_t kLastEpoch = (uint64_t{1} << kEpochBits) - 1;
    for (uint32_t buffer = 0; buffer < kNumBuffers; ++buffer) {
        const LlClock packed{kLastEpoch, buffer, (1u << kNumBuffers) - 1};
        const LlClock seen = LlClock::of(packed.word());
        EXPECT_EQ(seen.epoch, packed.epoch);
        EXPECT_EQ(seen.latest_buffer, packed.latest_buffer);
        EXPECT_EQ(seen.held_buffers, packed.held_buffers);
    }
}

TEST(Packings, ARowsOriginHoldsItsNumbers) {
    const RowOrigin packed{kMaxTokensOfRank, kMaxTopk - 1, kDirectTokens | kDirectScales, kMaxChoicesOfRank};
    const RowOrigin seen = RowOrigin::of(packed.payload());
    EXPECT_EQ(seen.token_idx, packed.token_idx);
    EXPECT_EQ(seen.target_idx, packed.target_idx);
    EXPECT_EQ(seen.direct, packed.direct);
    EXPECT_EQ(seen.first_choice, packed.first_choice);
}

TEST(Packings, AnAnnouncingWordHoldsEpochAndPayload) {
    const uint64_t epoch = (uint64_t{1} << kEpochBits) - 1;
    EXPECT_EQ(word_epoch(pack_word(epoch, kMaxPayload)), epoch);
    EXPECT_EQ(word_payload(pack_word(epoch, kMaxPayload)), kMaxPayload);
}

}  // namespace
}  // namespace crossdock
