// SPDX-License-Identifier: Apache-2.0
// The CPU's sums by sign: whatever instructions a processor has, the bits are those of the plain loop.
#include "a2sgd/device/sign_sums.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "reference/formats.h"

namespace crossdock {
namespace {

using cpu::SignVariant;

constexpr DType kTypes[] = {DType::kBf16, DType::kF16, DType::kF32};

ncclDataType_t nccl_type(DType dtype) {
    if (dtype == DType::kF32) return ncclFloat32;
    return dtype == DType::kF16 ? ncclFloat16 : ncclBfloat16;
}

float value_at(DType dtype, const std::byte* entries, size_t i) {
    return reference::decode(nccl_type(dtype), entries + i * dtype_bytes(dtype));
}

// Random bits are numbers of all magnitudes, subnormal ones and zeros of both signs among them.
std::vector<std::byte> random_entries(DType dtype, uint32_t count, uint32_t seed) {
    std::vector<std::byte> entries(uint64_t{count} * dtype_bytes(dtype));
    uint32_t state = seed;
    for (uint32_t i = 0; i < count; ++i) {
        state = state * 1664525u + 1013904223u;
        uint32_t bits = state ^ state >> 15;
        if (bits % 16 == 3) bits &= 0x80008000u;
        const float value = reference::decode(nccl_type(dtype), reinterpret_cast<const std::byte*>(&bits));
        // Far from where sums overflow.
        const float small = std::isfinite(value) && std::abs(value) < 1e30f ? value : 1.5f;
        reference::encode(nccl_type(dtype), small, entries.data() + i * dtype_bytes(dtype));
    }
    return entries;
}

// As a2sgd/device/sign_sums.h reads.
template <typename Sum>
SignSums plain_sums(DType dtype, const std::byte* entries, uint32_t count) {
    std::vector<Sum> positive(kSignColumns), negative(kSignColumns);
    SignSums sums{};
    for (uint32_t i = 0; i < count; ++i) {
        const float value = value_at(dtype, entries, i);
        if (value >= 0) {
            positive[i % kSignColumns] += value;
            ++sums.num_positive;
        } else {
            negative[i % kSignColumns] -= value;
        }
    }
    for (uint32_t stride = kSignColumns / 2; stride > 0; stride /= 2) {
        for (uint32_t i = 0; i < stride; ++i) {
            positive[i] += positive[i + stride];
            negative[i] += negative[i + stride];
        }
    }
    sums.positive = positive[0];
    sums.negative = negative[0];
    return sums;
}

void expect_same_sums(const SignVariant& variant, DType dtype, const std::vector<std::byte>& entries, uint32_t count) {
    for (const bool is_fp64 : {false, true}) {
        SCOPED_TRACE(std::string(variant.name) + (is_fp64 ? ", fp64, " : ", fp32, ") + std::to_string(count));
        SignSums seen{};
        (is_fp64 ? variant.sums_in_fp64 : variant.sums_in_fp32)(dtype, entries.data(), count, seen);
        const SignSums expected = is_fp64 ? plain_sums<double>(dtype, entries.data(), count)
                                          : plain_sums<float>(dtype, entries.data(), count);
        EXPECT_EQ(seen.num_positive, expected.num_positive);
        EXPECT_EQ(seen.is_finite(), expected.is_finite());
        if (!expected.is_finite()) continue;
        EXPECT_EQ(std::memcmp(&seen.positive, &expected.positive, sizeof(double)), 0)
            << seen.positive << " instead of " << expected.positive;
        EXPECT_EQ(std::memcmp(&seen.negative, &expected.negative, sizeof(double)), 0)
            << seen.negative << " instead of " << expected.negative;
    }
}

TEST(SignSums, AllVariantsHaveTheBitsOfThePlainLoop) {
    for (const SignVariant* variant : cpu::sign_variants()) {
        for (const DType dtype : kTypes) {
            uint32_t seed = 1;
            for (const uint32_t count : {1u, 7u, 31u, 255u, 256u, 257u, 511u, 1023u, 1024u, 2050u, 3840u, 4095u, 4096u})
                expect_same_sums(*variant, dtype, random_entries(dtype, count, seed++), count);
        }
    }
}

TEST(SignSums, InfinitiesAndNansAreSeenWhereverTheyAre) {
    constexpr float kBad[] = {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()};
    for (const SignVariant* variant : cpu::sign_variants()) {
        for (const DType dtype : kTypes) {
            for (uint32_t i = 0; i < 600; i += 7) {
                std::vector<std::byte> entries = random_entries(dtype, 600, i + 1);
                reference::encode(nccl_type(dtype), kBad[i % 3], entries.data() + i * dtype_bytes(dtype));
                expect_same_sums(*variant, dtype, entries, 600);
            }
        }
    }
}

// `before` + up or down, rounded; a NaN of 16 bits has one spelling.
void expect_shifted(DType dtype, const std::byte* before, const std::byte* seen, float up, float down) {
    const float value = reference::decode(nccl_type(dtype), before);
    const float moved = value + (value >= 0 ? up : down);
    if (std::isnan(moved) && dtype == DType::kF32) {
        ASSERT_TRUE(std::isnan(reference::decode(nccl_type(dtype), seen)));
        return;
    }
    uint32_t expected = 0x7FFF, got = 0;
    if (!std::isnan(moved)) reference::encode(nccl_type(dtype), moved, reinterpret_cast<std::byte*>(&expected));
    std::memcpy(&got, seen, dtype_bytes(dtype));
    if (dtype != DType::kF32) expected &= 0xFFFF;
    ASSERT_EQ(got, expected) << value << " by " << up << " or " << down;
}

// Every number of 16 bits, and what is none; of fp32 those whose upper bits they are.
TEST(SignSums, AllVariantsShiftEveryNumberAlike) {
    constexpr float kShifts[][2] = {{0, 0}, {0.25f, -3e-5f}, {-1e-7f, 1e-7f}, {60000, -60000}, {1e-40f, 3e38f}};
    for (const SignVariant* variant : cpu::sign_variants()) {
        for (const DType dtype : kTypes) {
            const size_t width = dtype_bytes(dtype);
            for (const auto& [up, down] : kShifts) {
                for (uint32_t first = 0; first < 65536; first += kSignChunk - 5) {
                    SCOPED_TRACE(std::string(variant->name) + ", numbers from " + std::to_string(first));
                    const uint32_t count = std::min(kSignChunk - 5, 65536 - first);
                    std::vector<std::byte> before(count * width);
                    for (uint32_t i = 0; i < count; ++i) {
                        const uint32_t bits = dtype == DType::kF32 ? (first + i) << 16 | 0x1234u : first + i;
                        std::memcpy(before.data() + i * width, &bits, width);
                    }
                    std::vector<std::byte> seen = before;
                    variant->shift(dtype, seen.data(), count, up, down);
                    for (size_t i = 0; i < count && !HasFatalFailure(); ++i)
                        expect_shifted(dtype, before.data() + i * width, seen.data() + i * width, up, down);
                }
            }
        }
    }
}

}  // namespace
}  // namespace crossdock
