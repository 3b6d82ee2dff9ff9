// SPDX-License-Identifier: Apache-2.0
// The tags of lines: where one is awaited, bytes of an earlier plain row may lie, which must not be taken for it.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "device/numeric.h"
#include "kernels/ll/ll128.h"
#include "runtime/cpu/local_executor.h"

namespace crossdock {
namespace {

constexpr uint64_t kLastEpoch = (uint64_t{1} << 40) - 1;

std::vector<uint64_t> some_epochs() {
    std::vector<uint64_t> epochs{kLastEpoch - 1, kLastEpoch};
    for (uint64_t epoch = 1; epoch < 70000; ++epoch) epochs.push_back(epoch);
    for (uint64_t epoch = 1; epoch < kLastEpoch; epoch *= 3) epochs.push_back(epoch);
    return epochs;
}

TEST(Ll128Tags, SayEpochAndContent) {
    for (const uint64_t epoch : some_epochs()) {
        for (const uint64_t content : {0, 1, 255}) {
            const uint64_t tag = ll128_tag(epoch, content);
            ASSERT_EQ(ll128_epoch(tag), epoch);
            ASSERT_EQ(ll128_content(tag), content);
        }
    }
}

TEST(Ll128Tags, AreNoNumbersOfAnyFormat) {
    for (const uint64_t epoch : some_epochs()) {
        const uint64_t tag = ll128_tag(epoch, 0);
        ASSERT_TRUE(std::isnan(std::bit_cast<float>(static_cast<uint32_t>(tag >> 32))));
        ASSERT_TRUE(std::isnan(element_of<DType::kBf16>(tag, 3)));
        ASSERT_TRUE(std::isnan(element_of<DType::kF16>(tag, 3)));
        ASSERT_EQ(tag >> 48, 0xFFFF) << "two NaNs of e4m3";
    }
}

// A diagnosis says of which operation the lines are that are there instead of the awaited ones.
TEST(Ll128Tags, TellADiagnosisWhatIsThere) {
    cpu::LocalExecutor(1).run({1, 1, 1024}, [&](cpu::Warp& warp) {
        const Ctx ctx(warp);
        const Ll128Row row(ctx, 4096);
        alignas(128) std::byte lines[2 * 4096] = {};
        const std::vector<std::byte> data(4096);
        EXPECT_EQ(epoch_in_ll128(ctx, lines, 0), 0u) << "zeroed memory";
        for (const uint64_t epoch : {uint64_t{7}, kLastEpoch}) {
            for (uint32_t group = 0; group < row.groups(); ++group) {
                Ll128Group stored;
                stored.read(row, group, data.data());
                stored.store(ctx, row, group, lines + row.offset_in_lines(group), ll128_tag(epoch, 0));
                EXPECT_EQ(epoch_in_ll128(ctx, lines, group), epoch) << "group " << group;
            }
        }
        std::memset(lines, 0x3c, sizeof(lines));
        EXPECT_EQ(epoch_in_ll128(ctx, lines, 0), 0u) << "a plain row";
    });
}

// Zeroed memory, and rows that hold what announcing words hold.
TEST(Ll128Tags, AreNoAnnouncingWords) {
    ASSERT_GT(ll128_epoch(0), kLastEpoch);
    for (uint64_t epoch = 1; epoch < 70000; ++epoch) {
        ASSERT_GT(ll128_epoch(pack_word(epoch, 0)), kLastEpoch);
        ASSERT_GT(ll128_epoch(epoch), kLastEpoch);
    }
}

}  // namespace
}  // namespace crossdock
