// SPDX-License-Identifier: Apache-2.0
// MXFP8 rows of a combine: e4m3 elements, and one e8m0 scale, a power of two, per block of 32.
#pragma once

#include "device/context.h"
#include "device/numeric.h"
#include "device/sum_rows.h"

namespace crossdock {

inline constexpr uint32_t kMxfp8Block = 32;

// A row is sent in independent parts: [elements payload][elements / 32 scales][padding], a multiple of 16 bytes. All
// parts but the last have the same number of elements.
CROSSDOCK_HOST_DEVICE constexpr uint32_t mxfp8_part_bytes(uint32_t elements) {
    return (elements + elements / kMxfp8Block + 15) / 16 * 16;
}
CROSSDOCK_HOST_DEVICE constexpr uint32_t mxfp8_wire_bytes(uint32_t elements, uint32_t part_elements) {
    const uint32_t rest = elements % part_elements;
    return elements / part_elements * mxfp8_part_bytes(part_elements) + mxfp8_part_bytes(rest);
}

namespace {

inline constexpr uint32_t kMxfp8Nan = 255;  // the scale of a block that holds an infinity or a NaN

// The exponent, with its bias of 127, of the smallest power of two by which the block's largest magnitude (as bits of a
// float) becomes at most 448, so that no element saturates.
CROSSDOCK_DEVICE uint32_t mxfp8_scale_of(uint32_t largest_bits) {
    constexpr uint32_t kMantissaOf448 = 0x600000;  // 448 = 1.75 * 2^8
    const uint32_t exponent = largest_bits >> 23;
    if (exponent == 255) return kMxfp8Nan;
    const uint32_t rounded = exponent + ((largest_bits & 0x7FFFFF) > kMantissaOf448 ? 1 : 0);
    return rounded > 8 ? rounded - 8 : 0;
}

CROSSDOCK_DEVICE float mxfp8_scale_to_float(uint32_t scale) {
    if (scale == kMxfp8Nan) return float_of(0x7FC00000u);
    return float_of(scale == 0 ? 0x00400000u : scale << 23);  // 2^-127 is subnormal
}

// One warp, one block per lane. Quantises bf16 elements. Source and target begin at multiples of 16 bytes.
CROSSDOCK_DEVICE void quantise_mxfp8(const Ctx& ctx, const std::byte* source, uint32_t elements, std::byte* payload,
                                     std::byte* scales) {
    constexpr uint32_t kVectors = kMxfp8Block / 8;
    CROSSDOCK_ROLLED
    for (uint32_t block = ctx.lane(); block < elements / kMxfp8Block; block += kLanes) {
        const Bytes16* const words = reinterpret_cast<const Bytes16*>(source) + block * kVectors;
        Bytes16 vectors[kVectors];
        uint32_t largest = 0;
        CROSSDOCK_UNROLL
        for (uint32_t v = 0; v < kVectors; ++v) {
            vectors[v] = words[v];
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < 8; ++i) {
                // Magnitudes order as their bits do; an infinity or NaN is the largest of all.
                const uint64_t word = i < 4 ? vectors[v].low : vectors[v].high;
                const uint32_t bits = static_cast<uint32_t>(word >> (16 * (i % 4))) & 0x7FFFu;
                largest = bits > largest ? bits : largest;
            }
        }
        const uint32_t scale = mxfp8_scale_of(largest << 16);
        const float inverse = float_of(scale == kMxfp8Nan ? 0x3F800000u : (254 - scale) << 23);
        CROSSDOCK_UNROLL
        for (uint32_t v = 0; v < kVectors; ++v) {
            float values[8];
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < 8; ++i)
                values[i] = element_of<DType::kBf16>(i < 4 ? vectors[v].low : vectors[v].high, i % 4);
            store_e4m3(values, inverse, payload + block * kMxfp8Block + 8 * v);
        }
        scales[block] = static_cast<std::byte>(scale);
    }
}

// One warp, 16 elements per lane at a time. out[e] = sum over i of rows[i][e], i ascending, of `count` wire rows, in
// fp32 with one rounding to bf16.
CROSSDOCK_DEVICE void sum_mxfp8_rows(const Ctx& ctx, const std::byte* const* rows, uint32_t count, uint32_t elements,
                                     uint32_t part_elements, std::byte* out) {
    constexpr uint32_t kAtOnce = 16;
    static_assert(kMxfp8Block % kAtOnce == 0, "the elements of a step share a scale");
    CROSSDOCK_ROLLED
    for (uint32_t at = ctx.lane() * kAtOnce; at < elements; at += kLanes * kAtOnce) {
        const uint32_t part = at / part_elements;
        const uint32_t in_part = at - part * part_elements;
        const uint32_t left = elements - part * part_elements;
        const uint32_t payload = part * mxfp8_part_bytes(part_elements);
        const uint32_t scales = payload + (left < part_elements ? left : part_elements);
        float sums[kAtOnce / 8][8] = {};
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < count; ++i) {
            const Bytes16 packed = *reinterpret_cast<const Bytes16*>(rows[i] + payload + in_part);
            const uint32_t scale = static_cast<uint32_t>(rows[i][scales + in_part / kMxfp8Block]);
            const float factor = mxfp8_scale_to_float(scale);
            CROSSDOCK_UNROLL
            for (uint32_t e = 0; e < kAtOnce; ++e) {
                const uint8_t bits = static_cast<uint8_t>((e < 8 ? packed.low : packed.high) >> (8 * (e % 8)));
                sums[e / 8][e % 8] = fused_multiply_add(e4m3_to_float(bits), factor, sums[e / 8][e % 8]);
            }
        }
        CROSSDOCK_UNROLL
        for (uint32_t half = 0; half < kAtOnce / 8; ++half)
            reinterpret_cast<Bytes16*>(out)[at / 8 + half] = packed_sums<DType::kBf16>(sums[half]);
    }
}

}  // namespace
}  // namespace crossdock
