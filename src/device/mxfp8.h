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

// A lane holds all vectors of a block, or one vector: then four neighbours hold a block.
constexpr uint32_t kMxfp8BlockVectors = kMxfp8Block / 8;
constexpr uint32_t kMxfp8Vectors = kLanes == 1 ? kMxfp8BlockVectors : 1;
static_assert(kLanes == 1 || kLanes % kMxfp8BlockVectors == 0, "no block is divided between warps");

// One warp. Quantises the bf16 elements that a lane holds. payload: for its first element; scale: of the block.
CROSSDOCK_DEVICE void quantise_mxfp8(const Ctx& ctx, const Bytes16 (&vectors)[kMxfp8Vectors], bool is_stored,
                                     std::byte* payload, std::byte* scale) {
    // Magnitudes order as their bits do; an infinity or NaN is the largest of all.
    uint32_t pair = 0;
    CROSSDOCK_UNROLL
    for (const Bytes16& vector : vectors) {
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t two = static_cast<uint32_t>((i < 2 ? vector.low : vector.high) >> (32 * (i % 2)));
            pair = larger_halves(pair, two & 0x7FFF7FFFu);
        }
    }
    const uint32_t largest =
        ctx.group_max<kMxfp8BlockVectors>(pair >> 16 > (pair & 0xFFFFu) ? pair >> 16 : pair & 0xFFFFu);
    const uint32_t exponent = mxfp8_scale_of(largest << 16);
    const float inverse = float_of(exponent == kMxfp8Nan ? 0x3F800000u : (254 - exponent) << 23);
    if (!is_stored) return;
    CROSSDOCK_UNROLL
    for (uint32_t v = 0; v < kMxfp8Vectors; ++v) {
        float values[8];
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < 8; ++i)
            values[i] = element_of<DType::kBf16>(i < 4 ? vectors[v].low : vectors[v].high, i % 4);
        store_e4m3(values, inverse, payload + 8 * v);
    }
    if (ctx.lane() % kMxfp8BlockVectors == 0) *scale = static_cast<std::byte>(exponent);
}

// One warp. Quantises bf16 elements. Source and target begin at multiples of 16 bytes.
CROSSDOCK_DEVICE void quantise_mxfp8(const Ctx& ctx, const std::byte* source, uint32_t elements, std::byte* payload,
                                     std::byte* scales) {
    constexpr uint32_t kAtOnce = 8 * kMxfp8Vectors;
    CROSSDOCK_ROLLED
    for (uint32_t first = 0; first < elements; first += kLanes * kAtOnce) {
        const uint32_t at = first + ctx.lane() * kAtOnce;
        Bytes16 vectors[kMxfp8Vectors];
        CROSSDOCK_UNROLL
        for (uint32_t v = 0; v < kMxfp8Vectors; ++v)
            vectors[v] = at < elements ? reinterpret_cast<const Bytes16*>(source)[at / 8 + v] : Bytes16{};
        quantise_mxfp8(ctx, vectors, at < elements, payload + at, scales + at / kMxfp8Block);
    }
}

// A lane's 16 elements of some wire rows. All loads are issued before one is used.
template <uint32_t kRows>
struct Mxfp8Rows {
    static constexpr uint32_t kElements = 16;
    static_assert(kMxfp8Block % kElements == 0, "a lane's elements share a scale");
    Bytes16 payloads[kRows];
    uint32_t scales[kRows];

    // payload, scale: offsets in a row.
    CROSSDOCK_DEVICE void load(const std::byte* const* rows, uint32_t count, uint32_t payload, uint32_t scale) {
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kRows; ++i) {
            if (i >= count) continue;
            payloads[i] = *reinterpret_cast<const Bytes16*>(rows[i] + payload);
            scales[i] = static_cast<uint32_t>(rows[i][scale]);
        }
    }
    CROSSDOCK_DEVICE void add_to(float (&sums)[2][8], uint32_t count) const {
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kRows; ++i) {
            if (i >= count) continue;
            const float factor = mxfp8_scale_to_float(scales[i]);
            CROSSDOCK_UNROLL
            for (uint32_t half = 0; half < 2; ++half) {
                float values[8];
                unpack_e4m3(half == 0 ? payloads[i].low : payloads[i].high, values);
                CROSSDOCK_UNROLL
                for (uint32_t e = 0; e < 8; ++e) sums[half][e] = fused_multiply_add(values[e], factor, sums[half][e]);
            }
        }
    }
};

// One warp. At most kRows rows, kSteps times all lanes' elements at a time; more rows: kSteps 1, so many at a time.
template <uint32_t kRows, uint32_t kSteps>
CROSSDOCK_DEVICE void sum_mxfp8_steps(const Ctx& ctx, const std::byte* const* rows, uint32_t count, uint32_t elements,
                                      uint32_t part_elements, std::byte* out) {
    using Rows = Mxfp8Rows<kRows>;
    constexpr uint32_t kStep = kLanes * Rows::kElements;
    CROSSDOCK_ROLLED
    for (uint32_t begin = ctx.lane() * Rows::kElements; begin < elements; begin += kSteps * kStep) {
        Rows loaded[kSteps];
        uint32_t payloads[kSteps], scales[kSteps];
        CROSSDOCK_UNROLL
        for (uint32_t s = 0; s < kSteps; ++s) {
            const uint32_t at = begin + s * kStep;
            const uint32_t part = at / part_elements;
            const uint32_t in_part = at - part * part_elements;
            const uint32_t left = elements - part * part_elements;
            payloads[s] = part * mxfp8_part_bytes(part_elements) + in_part;
            scales[s] = payloads[s] - in_part + (left < part_elements ? left : part_elements) + in_part / kMxfp8Block;
            if (at < elements) loaded[s].load(rows, count, payloads[s], scales[s]);
        }
        CROSSDOCK_UNROLL
        for (uint32_t s = 0; s < kSteps; ++s) {
            const uint32_t at = begin + s * kStep;
            if (at >= elements) break;
            float sums[2][8] = {};
            loaded[s].add_to(sums, count);
            CROSSDOCK_ROLLED
            for (uint32_t first = kRows; kSteps == 1 && first < count; first += kRows) {
                loaded[s].load(rows + first, count - first, payloads[s], scales[s]);
                loaded[s].add_to(sums, count - first);
            }
            CROSSDOCK_UNROLL
            for (uint32_t half = 0; half < 2; ++half)
                reinterpret_cast<Bytes16*>(out)[at / 8 + half] = packed_sums<DType::kBf16>(sums[half]);
        }
    }
}

// One warp. out[e] = sum over i of rows[i][e], i ascending, of `count` wire rows, in fp32 with one rounding to bf16.
CROSSDOCK_DEVICE void sum_mxfp8_rows(const Ctx& ctx, const std::byte* const* rows, uint32_t count, uint32_t elements,
                                     uint32_t part_elements, std::byte* out) {
    if constexpr (kLanes > 1) {
        if (count <= 2) return sum_mxfp8_steps<2, 2>(ctx, rows, count, elements, part_elements, out);
    }
    sum_mxfp8_steps<4, 1>(ctx, rows, count, elements, part_elements, out);
}

}  // namespace
}  // namespace crossdock
