// SPDX-License-Identifier: Apache-2.0
// The reference itself against values that can be worked out by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "combine.h"
#include "formats.h"

namespace crossdock::reference {
namespace {

uint32_t bits_of(ncclDataType_t type, float value) {
    uint32_t bits = 0;
    encode(type, value, reinterpret_cast<std::byte*>(&bits));
    return bits;
}

float value_of(ncclDataType_t type, uint32_t bits) { return decode(type, reinterpret_cast<const std::byte*>(&bits)); }

TEST(Formats, Bf16HasKnownValuesAndRoundsTiesToEven) {
    EXPECT_EQ(bits_of(ncclBfloat16, 1.0f), 0x3F80u);
    EXPECT_EQ(bits_of(ncclBfloat16, -2.5f), 0xC020u);
    EXPECT_EQ(bits_of(ncclBfloat16, 0x1.01p0f), 0x3F80u);  // a tie: down to even
    EXPECT_EQ(bits_of(ncclBfloat16, 0x1.03p0f), 0x3F82u);  // a tie: up to even
    EXPECT_EQ(bits_of(ncclBfloat16, 0x1.010002p0f), 0x3F81u);
    EXPECT_EQ(bits_of(ncclBfloat16, 0x1.FFFFFEp127f), 0x7F80u);
    EXPECT_EQ(bits_of(ncclBfloat16, 0x1p-133f), 1u);
    EXPECT_EQ(bits_of(ncclBfloat16, -0.0f), 0x8000u);
    EXPECT_EQ(value_of(ncclBfloat16, 0x4049), 3.140625f);
}

TEST(Formats, Fp16HasKnownValues) {
    EXPECT_EQ(bits_of(ncclFloat16, 1.0f), 0x3C00u);
    EXPECT_EQ(bits_of(ncclFloat16, 65504.0f), 0x7BFFu);
    EXPECT_EQ(bits_of(ncclFloat16, 65519.0f), 0x7BFFu);
    EXPECT_EQ(bits_of(ncclFloat16, 65520.0f), 0x7C00u);
    EXPECT_EQ(bits_of(ncclFloat16, 0x1p-24f), 1u);
    EXPECT_EQ(bits_of(ncclFloat16, 0x1p-25f), 0u);  // a tie: down to even
    EXPECT_EQ(bits_of(ncclFloat16, 1.0f / 3), 0x3555u);
    EXPECT_EQ(value_of(ncclFloat16, 0x0400), 0x1p-14f);
}

TEST(Formats, E4m3HasKnownValuesAndSaturates) {
    EXPECT_EQ(bits_of(ncclFloat8e4m3, 448.0f), 0x7Eu);
    EXPECT_EQ(bits_of(ncclFloat8e4m3, 1000.0f), 0x7Eu);
    EXPECT_EQ(bits_of(ncclFloat8e4m3, -1000.0f), 0xFEu);
    EXPECT_EQ(bits_of(ncclFloat8e4m3, 1.0f), 0x38u);
    EXPECT_EQ(bits_of(ncclFloat8e4m3, 0x1p-9f), 1u);
    EXPECT_EQ(bits_of(ncclFloat8e4m3, 0x1p-10f), 0u);
    EXPECT_EQ(bits_of(ncclFloat8e4m3, 17.0f), 0x58u);  // a tie between 16 and 18
    EXPECT_EQ(value_of(ncclFloat8e4m3, 0x7D), 416.0f);
    EXPECT_TRUE(std::isnan(value_of(ncclFloat8e4m3, 0x7F)));
}

TEST(Formats, E2m1CountsToSix) {
    const float values[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (uint8_t bits = 0; bits < 8; ++bits) {
        EXPECT_EQ(decode_e2m1(bits), values[bits]);
        EXPECT_EQ(encode_e2m1(values[bits]), bits);
        EXPECT_EQ(encode_e2m1(-values[bits]), bits | 8);
    }
    EXPECT_EQ(encode_e2m1(5.0f), 6);  // a tie: to even
    EXPECT_EQ(encode_e2m1(2.5f), 4);
    EXPECT_EQ(encode_e2m1(0.25f), 0);
    EXPECT_EQ(encode_e2m1(100.0f), 7);
}

TEST(Formats, RowsAreTheirElements) {
    for (const ncclDataType_t type : {ncclBfloat16, ncclFloat16, ncclFloat8e4m3, ncclFloat8e5m2, ncclFloat32}) {
        const size_t bytes = type_bytes(type);
        std::vector<std::byte> row(65536 * bytes);
        for (uint32_t i = 0; i < 65536; ++i) {
            const uint32_t bits = bytes == 4 ? i * 0x10001u : i;
            std::memcpy(&row[i * bytes], &bits, bytes);
        }
        const std::vector<float> values = decoded(type, row);
        ASSERT_EQ(values.size(), 65536u);
        for (size_t i = 0; i < values.size(); ++i) {
            const float value = decode(type, &row[i * bytes]);
            ASSERT_EQ(std::memcmp(&values[i], &value, sizeof value), 0) << type_name(type) << " " << i;
            encode(type, value, &row[i * bytes]);
        }
        EXPECT_EQ(encoded(type, values), row) << type_name(type);
    }
}

TEST(Formats, EncodingUndoesDecoding) {
    for (const ncclDataType_t type : {ncclBfloat16, ncclFloat16, ncclFloat8e4m3, ncclFloat8e5m2}) {
        const uint32_t num_codes = type_bytes(type) == 1 ? 256 : 65536;
        for (uint32_t bits = 0; bits < num_codes; ++bits) {
            const float value = value_of(type, bits);
            if (std::isnan(value) || std::isinf(value)) continue;
            ASSERT_EQ(bits_of(type, value), bits) << type_name(type);
        }
    }
}

// Two ranks, two experts each: rank 0 has tokens for experts {0, 2} and {3, 3}, rank 1 one token for {-1, 2}.
Problem small_problem(ncclEpLayout_t layout) {
    Problem problem;
    problem.num_ranks = 2;
    problem.num_experts = 4;
    problem.max_tokens = 2;
    problem.num_topk = 2;
    problem.layout = layout;
    problem.ranks = {{2, {0, 2, 3, 3}, {0.5f, 0.25f, 1.0f, 2.0f}}, {1, {-1, 2}, {1.0f, 4.0f}}};
    return problem;
}

TEST(Reference, RowsOfTheExpertMajorLayoutAreInOrder) {
    const Problem problem = small_problem(NCCL_EP_LAYOUT_EXPERT_MAJOR);
    const auto first = received_rows(problem, 0);
    ASSERT_EQ(first[0].size(), 1u);
    EXPECT_EQ(first[1].size(), 0u);
    const auto second = received_rows(problem, 1);
    ASSERT_EQ(second[0].size(), 2u);
    EXPECT_EQ(second[0][0].source, 0);
    EXPECT_EQ(second[0][1].source, 1);
    ASSERT_EQ(second[1].size(), 2u);  // the duplicate has two rows
    EXPECT_EQ(second[1][0].choice, 0);
    EXPECT_EQ(second[1][1].choice, 1);
    EXPECT_EQ(received_rows(problem, 1, {0, 1})[0].size(), 1u);
}

TEST(Reference, RowsOfTheRankMajorLayoutAreOneAToken) {
    const Problem problem = small_problem(NCCL_EP_LAYOUT_RANK_MAJOR);
    const auto rows = received_rows(problem, 1);
    EXPECT_EQ(rows[0].size(), 2u);
    EXPECT_EQ(rows[1].size(), 1u);
    EXPECT_EQ(metadata_of(problem, 1, {0, 0, 0}).ids, (std::vector<int64_t>{-1, 0}));
    EXPECT_EQ(metadata_of(problem, 1, {0, 1, 0}).ids, (std::vector<int64_t>{1, 1}));
    EXPECT_EQ(metadata_of(problem, 1, {0, 1, 0}).weights, (std::vector<float>{1.0f, 2.0f}));
}

TEST(Reference, CombineWeighsInOrderAndDropsNothingElse) {
    Problem problem = small_problem(NCCL_EP_LAYOUT_EXPERT_MAJOR);
    problem.combine_type = ncclFloat32;
    problem.combine_hidden = 4;
    const std::vector<std::byte> row = combined_row(problem, 0, 0);
    const std::vector<std::byte> a = expert_row(problem, 0, {0, 0, 0});
    const std::vector<std::byte> b = expert_row(problem, 1, {0, 0, 1});
    for (int i = 0; i < 4; ++i) {
        const float x = decode(ncclFloat32, &a[i * 4]);
        const float y = decode(ncclFloat32, &b[i * 4]);
        EXPECT_EQ(decode(ncclFloat32, &row[i * 4]), std::fma(0.25f, y, 0.5f * x));
    }
    const BoundedRow bounded = bounded_row(problem, 0, 0);
    for (int i = 0; i < 4; ++i) {
        EXPECT_LE(std::fabs(decode(ncclFloat32, &row[i * 4]) - bounded.sum[i]), bounded.bound[i]);
    }
}

TEST(Reference, Fp8ScalesAreRoundedUpToPowersOfTwo) {
    Problem problem = small_problem(NCCL_EP_LAYOUT_EXPERT_MAJOR);
    problem.recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4;
    problem.hidden = 1024;
    problem.num_scales = 8;
    const ArrivedRow plain = arrived_row(problem, {0, 0, 0});
    problem.round_scales = true;
    const ArrivedRow rounded = arrived_row(problem, {0, 0, 0});
    for (int block = 0; block < 8; ++block) {
        const float exact = decode(ncclFloat32, &plain.scales[block * 4]);
        const float power = decode(ncclFloat32, &rounded.scales[block * 4]);
        int exponent = 0;
        EXPECT_EQ(std::frexp(power, &exponent), 0.5f);
        EXPECT_GE(power, exact);
        EXPECT_LT(power, 2 * exact);
    }
}

}  // namespace
}  // namespace crossdock::reference
