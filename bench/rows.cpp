// SPDX-License-Identifier: Apache-2.0
#include "bench/rows.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "tools/common/bfloat16.h"
#include "tools/common/random.h"

namespace crossdock::bench {
namespace {

// What rows of --recipe fwd hold already when they are sent.
constexpr const DispatchRecipe& kForwarded = recipe_of(NCCL_EP_DISP_QUANT_DS_FP8E3M4);

// The recipe that makes of a token's values what arrives.
const DispatchRecipe& quantisation_of(const Options& options) {
    const DispatchRecipe& recipe = recipe_of(options.recipe);
    return recipe.forwards_scales ? kForwarded : recipe;
}

tools::Random random_for(const Options& options, int rank, int token, uint64_t purpose) {
    const auto place = static_cast<uint64_t>(rank) << 32 | static_cast<uint64_t>(token);
    return tools::Random(tools::mix_bits(options.seed * 8 + purpose) ^ tools::mix_bits(place));
}

// Of values in fp16's normal range, to the nearest, ties to even.
uint16_t float_to_half(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = bits >> 16 & 0x8000;
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude < 0x38800000) {
        // Subnormal: a multiple of 2^-24.
        return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::lrint(std::fabs(value) * 0x1p24)));
    }
    const uint32_t rebased = magnitude - 0x38000000;
    return static_cast<uint16_t>(sign | ((rebased + 0xfff + (rebased >> 13 & 1)) >> 13));
}

float half_to_float(uint16_t bits) {
    const int exponent = bits >> 10 & 31;
    const int fraction = bits & 1023;
    const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                          : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
    return bits & 0x8000 ? -magnitude : magnitude;
}

// To e4m3: three fraction bits, exponents from -6 to 8, at most 448; to the nearest, ties to even, saturating.
uint8_t float_to_e4m3(float value) {
    const uint8_t sign = std::signbit(value) ? 0x80 : 0;
    const float magnitude = std::min(std::fabs(value), 448.0f);
    if (magnitude == 0) {
        return sign;
    }
    const int exponent = std::max(std::ilogb(magnitude), -6);
    // In units of the last place; 16 of them carry into the next exponent, which the addition below does by itself.
    const auto units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
    return static_cast<uint8_t>(sign | ((exponent + 6) * 8 + units));
}

// One fp32 scale per block: amax * (1 / 448) (amax at least 1e-4), and the block's values over it in e4m3.
Row quantised_to_fp8(const std::vector<float>& values) {
    constexpr size_t kScaleBlock = 128;
    Row row;
    for (size_t first = 0; first < values.size(); first += kScaleBlock) {
        float amax = 1e-4f;
        for (size_t i = first; i < first + kScaleBlock; ++i) {
            amax = std::max(amax, std::fabs(values[i]));
        }
        const float multiplier = 448.0f / amax;
        row.scales.push_back(amax * (1.0f / 448.0f));
        for (size_t i = first; i < first + kScaleBlock; ++i) {
            row.bytes.push_back(float_to_e4m3(values[i] * multiplier));
        }
    }
    return row;
}

Row quantised(const DispatchRecipe& recipe, const std::vector<float>& values) {
    switch (recipe.value) {
        case NCCL_EP_DISP_QUANT_NONE:
        case NCCL_EP_DISP_QUANT_FWD:
            break;
        case NCCL_EP_DISP_QUANT_DS_FP8E3M4:
            return quantised_to_fp8(values);
    }
    return {};
}

size_t bytes_of(ncclDataType_t dtype) { return find_data_type(dtype)->bytes; }

}  // namespace

ncclDataType_t input_dtype(const Options& options) {
    return recipe_of(options.recipe).forwards_scales ? kForwarded.received_type : options.dtype;
}

ncclDataType_t output_dtype(const Options& options) {
    const DispatchRecipe& recipe = quantisation_of(options);
    return recipe.computes_scales() ? recipe.received_type : options.dtype;
}

size_t input_element_bytes(const Options& options) { return bytes_of(input_dtype(options)); }
size_t output_element_bytes(const Options& options) { return bytes_of(output_dtype(options)); }
size_t combine_element_bytes(const Options& options) { return bytes_of(options.dtype); }

size_t num_scales(const Options& options) {
    const DispatchRecipe& recipe = quantisation_of(options);
    return recipe.computes_scales() ? static_cast<size_t>(options.hidden) / recipe.scale_block : 0;
}

std::vector<float> token_values(const Options& options, int rank, int token) {
    tools::Random random = random_for(options, rank, token, 1);
    std::vector<float> values(static_cast<size_t>(options.hidden));
    uint64_t word = 0;
    for (size_t i = 0; i < values.size(); ++i) {
        word = i % 8 == 0 ? random.next() : word >> 8;
        values[i] = static_cast<float>(static_cast<int>(word & 255) - 128) / 16.0f;
    }
    return values;
}

Row input_row(const Options& options, int rank, int token) {
    Row row;
    if (recipe_of(options.recipe).forwards_scales) {
        return expected_row(options, rank, token);
    }
    row.bytes.resize(static_cast<size_t>(options.hidden) * input_element_bytes(options));
    encode(options.dtype, token_values(options, rank, token), row.bytes.data());
    return row;
}

Row expected_row(const Options& options, int rank, int token) {
    const DispatchRecipe& recipe = quantisation_of(options);
    return recipe.computes_scales() ? quantised(recipe, token_values(options, rank, token))
                                    : input_row(options, rank, token);
}

std::vector<float> draw_weights(const Options& options, int rank) {
    tools::Random random = random_for(options, rank, 0, 2);
    std::vector<float> weights(static_cast<size_t>(options.max_tokens()) * static_cast<size_t>(options.topk));
    for (float& weight : weights) {
        weight = static_cast<float>(1 + random.below(64)) / 64.0f;
    }
    return weights;
}

float expert_factor(int expert) { return std::ldexp(1.0f, expert % 5 - 2); }

void encode(ncclDataType_t dtype, const std::vector<float>& values, uint8_t* bytes) {
    for (size_t i = 0; i < values.size(); ++i) {
        if (dtype == ncclFloat32) {
            std::memcpy(bytes + i * 4, &values[i], 4);
        } else {
            const uint16_t bits = dtype == ncclFloat16 ? float_to_half(values[i]) : tools::float_to_bfloat16(values[i]);
            std::memcpy(bytes + i * 2, &bits, 2);
        }
    }
}

float decode(ncclDataType_t dtype, const uint8_t* bytes, size_t index) {
    if (dtype == ncclFloat32) {
        float value;
        std::memcpy(&value, bytes + index * 4, 4);
        return value;
    }
    uint16_t bits;
    std::memcpy(&bits, bytes + index * 2, 2);
    return dtype == ncclFloat16 ? half_to_float(bits) : tools::bfloat16_to_float(bits);
}

float rounded(ncclDataType_t dtype, float value) {
    return dtype == ncclFloat32   ? value
           : dtype == ncclFloat16 ? half_to_float(float_to_half(value))
                                  : tools::round_to_bfloat16(value);
}

double unit_roundoff(ncclDataType_t dtype) {
    return dtype == ncclFloat32 ? 0x1p-24 : dtype == ncclFloat16 ? 0x1p-11 : tools::kBfloat16Roundoff;
}

}  // namespace crossdock::bench
