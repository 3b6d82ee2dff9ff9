// SPDX-License-Identifier: Apache-2.0
// The conversion to e4m3 of CPUs, and of GPUs without an instruction for it, gives what the instruction gives: for
// every bf16 value, also scaled, the nearest e4m3, ties to even, saturating; 0x7F for a NaN.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "device/numeric.h"
#include "reference/formats.h"

namespace crossdock {
namespace {

uint8_t expected(float value) {
    if (std::isnan(value)) return 0x7F;
    if (std::isinf(value)) return std::signbit(value) ? 0xFE : 0x7E;
    std::byte bits;
    reference::encode(ncclFloat8e4m3, value, &bits);
    return static_cast<uint8_t>(bits);
}

TEST(E4m3, EveryBf16ValueRoundsAsDefined) {
    for (const float multiplier : {1.0f, 448.0f / 3.0f, 0x1p-9f, 0x1.fffffep0f}) {
        for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
            const float value = bf16_to_float(static_cast<uint16_t>(bits)) * multiplier;
            ASSERT_EQ(float_to_e4m3(value), expected(value)) << value;
        }
    }
}

// Around each boundary between two neighbours, the floats next to it.
TEST(E4m3, TiesRoundToEven) {
    for (uint32_t bits = 0; bits < 0x7E; ++bits) {
        const float tie =
            (e4m3_to_float(static_cast<uint8_t>(bits)) + e4m3_to_float(static_cast<uint8_t>(bits + 1))) / 2;
        for (const float value : {std::nextafter(tie, 0.0f), tie, std::nextafter(tie, 1000.0f)}) {
            EXPECT_EQ(float_to_e4m3(value), expected(value)) << value;
            EXPECT_EQ(float_to_e4m3(-value), expected(-value)) << -value;
        }
    }
}

TEST(E4m3, WordsHoldFourInOrder) {
    const float values[8] = {1, -2, 448, 0.5f, -0.0f, 1e30f, 3, 17};
    alignas(4) std::byte packed[8];
    store_e4m3(values, 2.0f, packed);
    for (uint32_t i = 0; i < 8; ++i) EXPECT_EQ(static_cast<uint8_t>(packed[i]), float_to_e4m3(2 * values[i])) << i;
}

}  // namespace
}  // namespace crossdock
