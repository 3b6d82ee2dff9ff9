// SPDX-License-Identifier: Apache-2.0
#include "recipes.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "formats.h"
#include "src/core/recipes.h"

namespace crossdock::reference {
namespace {

constexpr size_t kFp8Block = 128;
constexpr size_t kNvfp4Block = 16;
static_assert(recipe_of(NCCL_EP_DISP_QUANT_DS_FP8E3M4).scale_block == kFp8Block &&
                  recipe_of(NCCL_EP_COMB_QUANT_NVFP4).row_multiple == 2 * kNvfp4Block,
              "the library's table and the oracle disagree about nccl_ep.h");

// g: the row's scale. Of a block with the largest magnitude b, the block scale s = e4m3(g b / 6) makes b about 6. Steps
// of 4-bit floats are 0.5 below 2, 1 below 4 and else 2, in units of s / g. Where s is subnormal or 0 (a block far
// smaller than its row), its own rounding, at most half of e4m3's smallest step, counts too.
double nvfp4_error(double x, double block_max, double g) {
    if (g == 0) return std::fabs(x);
    const double exact_scale = g * block_max / 6;
    const double scale_error = std::max(exact_scale * 0x1p-4, 0x1p-10) * 1.01;
    if (exact_scale + scale_error < 0x1p-9) return std::fabs(x);  // every block scale that may result is 0
    const double largest_scale = exact_scale + scale_error;
    const double smallest_scale = std::max(exact_scale - scale_error, 0.0);
    // Saturation at 6 of a value whose scale was rounded down, and half of the widest step that x can meet.
    const double saturation = std::max(0.0, std::fabs(x) - 6 * smallest_scale / g);
    const double magnitude = smallest_scale > 0 ? std::fabs(x) * g / smallest_scale : 6;
    const double half_step = magnitude < 2 ? 0.25 : magnitude < 4 ? 0.5 : 1.0;
    return (std::max(half_step * largest_scale / g, saturation) + std::fabs(x) * 0x1p-20) * 1.01;
}

std::vector<double> nvfp4_errors(const std::vector<float>& row) {
    const double g = row_scale(row);
    std::vector<double> errors(row.size());
    for (size_t block = 0; block < row.size(); block += kNvfp4Block) {
        double block_max = 0;
        for (size_t i = block; i < block + kNvfp4Block; ++i) block_max = std::max<double>(block_max, std::fabs(row[i]));
        for (size_t i = block; i < block + kNvfp4Block; ++i) errors[i] = nvfp4_error(row[i], block_max, g);
    }
    return errors;
}

// Each block: amax = max(1e-4, max |x|), scale = amax * (1 / 448) in fp32, stored value x * (448 / amax).
QuantisedRow fp8_row(const Problem& problem, const std::vector<std::byte>& row) {
    QuantisedRow result;
    std::vector<float> values = decoded(ncclBfloat16, row);
    result.scales.resize(problem.num_scales * sizeof(float));
    for (size_t block = 0; block < problem.hidden / kFp8Block; ++block) {
        float* const first = &values[block * kFp8Block];
        float amax = 1e-4f;
        for (size_t i = 0; i < kFp8Block; ++i) amax = std::max(amax, std::fabs(first[i]));
        float scale = amax * (1.0f / 448.0f);
        float multiplier = 448.0f / amax;
        if (problem.round_scales) {
            int exponent = 0;
            const float fraction = std::frexp(scale, &exponent);  // scale = fraction * 2^exponent, fraction in [0.5, 1)
            scale = std::ldexp(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
            multiplier = 1.0f / scale;
        }
        for (size_t i = 0; i < kFp8Block; ++i) first[i] *= multiplier;
        std::memcpy(&result.scales[block * sizeof(float)], &scale, sizeof scale);
    }
    result.tokens = encoded(ncclFloat8e4m3, values);
    return result;
}

}  // namespace

QuantisedRow quantised(const Problem& problem, const std::vector<std::byte>& row) {
    switch (problem.recipe) {
        case NCCL_EP_DISP_QUANT_NONE:
        case NCCL_EP_DISP_QUANT_FWD:
            break;
        case NCCL_EP_DISP_QUANT_DS_FP8E3M4:
            return fp8_row(problem, row);
    }
    return {row, {}};
}

// NVFP4: 2688 / max |x|, or 0 for a row of zeros.
float row_scale(const std::vector<float>& row) {
    float amax = 0;
    for (const float value : row) amax = std::max(amax, std::fabs(value));
    return amax == 0 ? 0.0f : 2688.0f / amax;
}

std::vector<double> quantisation_errors(ncclEpCombQuant_t recipe, const std::vector<float>& row) {
    switch (recipe) {
        case NCCL_EP_COMB_QUANT_NONE:
        case NCCL_EP_COMB_QUANT_MXFP8:
            break;
        case NCCL_EP_COMB_QUANT_NVFP4:
            return nvfp4_errors(row);
    }
    return std::vector<double>(row.size());
}

}  // namespace crossdock::reference
