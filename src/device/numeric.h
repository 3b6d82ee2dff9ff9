// SPDX-License-Identifier: Apache-2.0
// Number formats of tokens and scales, bit for bit the same on CPUs and GPUs: round to nearest even, subnormals kept.
#pragma once

#include "device/platform.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>

#include "device/ptx.cuh"
#else
#include <bit>
#include <cmath>
#endif

namespace crossdock {

enum class DType : uint32_t { kBf16, kF16, kF32 };

CROSSDOCK_HOST_DEVICE constexpr uint32_t dtype_bytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

// Calls run<dtype>().
template <typename Run>
void with_dtype(DType dtype, Run run) {
    switch (dtype) {
        case DType::kBf16:
            return run.template operator()<DType::kBf16>();
        case DType::kF16:
            return run.template operator()<DType::kF16>();
        case DType::kF32:
            return run.template operator()<DType::kF32>();
    }
}

namespace {

#if defined(__CUDACC__)
CROSSDOCK_DEVICE uint32_t bits_of(float value) { return __float_as_uint(value); }
CROSSDOCK_DEVICE float float_of(uint32_t bits) { return __uint_as_float(bits); }
CROSSDOCK_DEVICE float fused_multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
CROSSDOCK_DEVICE float f16_to_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
CROSSDOCK_DEVICE uint16_t float_to_f16(float value) { return __half_as_ushort(__float2half_rn(value)); }
CROSSDOCK_DEVICE float absolute(float value) { return fabsf(value); }
CROSSDOCK_DEVICE float larger(float a, float b) { return fmaxf(a, b); }
#else
CROSSDOCK_DEVICE uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
CROSSDOCK_DEVICE float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }
CROSSDOCK_DEVICE float fused_multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
CROSSDOCK_DEVICE float absolute(float value) { return float_of(bits_of(value) & 0x7FFFFFFFu); }
CROSSDOCK_DEVICE float larger(float a, float b) { return a > b ? a : b; }

CROSSDOCK_DEVICE float f16_to_float(uint16_t bits) {
    const uint32_t sign = (bits & 0x8000u) << 16;
    const uint32_t magnitude = bits & 0x7FFFu;
    // Shifted into place, exponent and mantissa are those of the value times 2^-112: one multiplication restores it,
    // subnormals too.
    const float scaled = float_of(magnitude << 13) * float_of(0x77800000u);
    const uint32_t result = magnitude >= 0x7C00u ? (0x7F800000u | (magnitude & 0x3FFu) << 13) : bits_of(scaled);
    return float_of(result | sign);
}

CROSSDOCK_DEVICE uint16_t float_to_f16(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return 0x7FFF;                                  // NaN, in CUDA's spelling
    if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds to infinity
    if (magnitude < 0x38800000u) {
        // Subnormal: adding 1/2 makes the hardware round at the right bit.
        const float rounded = float_of(magnitude) + 0.5f;
        return static_cast<uint16_t>(sign | (bits_of(rounded) - 0x3F000000u));
    }
    const uint32_t rounded = magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1);
    return static_cast<uint16_t>(sign | (rounded >> 13));
}
#endif

CROSSDOCK_DEVICE float bf16_to_float(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

CROSSDOCK_DEVICE uint16_t float_to_bf16(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : rounded);
}

// e4m3: 4 exponent bits (bias 7), 3 mantissa bits, largest 448, saturating; NaN 0x7F.
CROSSDOCK_DEVICE uint8_t float_to_e4m3(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t sign = (bits >> 24) & 0x80u;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return 0x7Fu;
    if (magnitude >= 0x43E00000u) return static_cast<uint8_t>(sign | 0x7Eu);
    if (magnitude < 0x3C800000u) {
        // Below 2^-6: multiples of 2^-9. Adding 2^14 makes the hardware round at that bit.
        const float rounded = float_of(magnitude) + 16384.0f;
        return static_cast<uint8_t>(sign | (bits_of(rounded) - 0x46800000u));
    }
    const uint32_t rounded = magnitude - 0x3C000000u + 0x7FFFFu + ((magnitude >> 20) & 1);
    return static_cast<uint8_t>(sign | (rounded >> 20));
}

CROSSDOCK_DEVICE float e4m3_to_float(uint8_t bits) {
    const uint32_t sign = (bits & 0x80u) << 24;
    const uint32_t magnitude = bits & 0x7Fu;
    if (magnitude == 0x7Fu) return float_of(sign | 0x7FC00000u);
    const float scaled = float_of(magnitude << 20) * float_of(0x7B800000u);  // times 2^120
    return float_of(bits_of(scaled) | sign);
}

// e2m1: magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6, saturating; ties to the even code.
CROSSDOCK_DEVICE uint8_t float_to_e2m1(float value) {
    const float magnitude = absolute(value);
    const uint8_t sign = static_cast<uint8_t>((bits_of(value) >> 28) & 8u);
    uint8_t code = 0;
    if (magnitude > 0.25f) code = 1;
    if (magnitude >= 0.75f) code = 2;
    if (magnitude > 1.25f) code = 3;
    if (magnitude >= 1.75f) code = 4;
    if (magnitude > 2.5f) code = 5;
    if (magnitude >= 3.5f) code = 6;
    if (magnitude > 5.0f) code = 7;
    return static_cast<uint8_t>(sign | code);
}

CROSSDOCK_DEVICE float e2m1_to_float(uint8_t code) {
    const uint32_t magnitude = code & 7u;
    const float value = magnitude < 2 ? 0.5f * static_cast<float>(magnitude)
                                      : float_of((126u + (magnitude >> 1)) << 23 | (magnitude & 1u) << 22);
    return (code & 8u) != 0 ? -value : value;
}

// Division with an error of one or two roundings.
CROSSDOCK_DEVICE float about_divided(float dividend, float divisor) {
#if defined(__CUDACC__)
    return __fdividef(dividend, divisor);
#else
    return dividend / divisor;
#endif
}

CROSSDOCK_DEVICE uint32_t number_of_ones(uint64_t bits) {
#if defined(__CUDACC__)
    return static_cast<uint32_t>(__popcll(bits));
#else
    return static_cast<uint32_t>(std::popcount(bits));
#endif
}

// The larger of both low halves, and of both high halves.
CROSSDOCK_DEVICE uint32_t larger_halves(uint32_t a, uint32_t b) {
#if defined(__CUDACC__)
    return __vmaxu2(a, b);
#else
    const uint32_t low = (a & 0xFFFFu) > (b & 0xFFFFu) ? a & 0xFFFFu : b & 0xFFFFu;
    return (a >> 16 > b >> 16 ? a : b) >> 16 << 16 | low;
#endif
}

// A row's elements as floats, whatever the dtype.
template <DType kDType>
CROSSDOCK_DEVICE float load_element(const std::byte* row, uint32_t element_idx) {
    if constexpr (kDType == DType::kF32) {
        return reinterpret_cast<const float*>(row)[element_idx];
    } else {
        const uint16_t bits = reinterpret_cast<const uint16_t*>(row)[element_idx];
        return kDType == DType::kBf16 ? bf16_to_float(bits) : f16_to_float(bits);
    }
}

template <DType kDType>
CROSSDOCK_DEVICE void store_element(std::byte* row, uint32_t element_idx, float value) {
    if constexpr (kDType == DType::kF32) {
        reinterpret_cast<float*>(row)[element_idx] = value;
    } else {
        reinterpret_cast<uint16_t*>(row)[element_idx] =
            kDType == DType::kBf16 ? float_to_bf16(value) : float_to_f16(value);
    }
}

// The elements of 8 bytes.
template <DType kDType>
CROSSDOCK_DEVICE float element_of(uint64_t packed, uint32_t i) {
    if constexpr (kDType == DType::kF32) {
        return float_of(static_cast<uint32_t>(packed >> (32 * i)));
    } else {
        const uint16_t bits = static_cast<uint16_t>(packed >> (16 * i));
        return kDType == DType::kBf16 ? bf16_to_float(bits) : f16_to_float(bits);
    }
}

template <DType kDType>
CROSSDOCK_DEVICE uint64_t packed_element(float value, uint32_t i) {
    if constexpr (kDType == DType::kF32) {
        return uint64_t{bits_of(value)} << (32 * i);
    } else {
        return uint64_t{kDType == DType::kBf16 ? float_to_bf16(value) : float_to_f16(value)} << (16 * i);
    }
}

// Four values as e4m3.
CROSSDOCK_DEVICE uint32_t packed_e4m3(const float (&values)[4]) {
#if defined(__CUDACC__)
    if constexpr (kHasFp8Conversions)
        return static_cast<uint32_t>(ptx::e4m3_pair_of(values[2], values[3])) << 16 |
               ptx::e4m3_pair_of(values[0], values[1]);
#endif
    uint32_t packed = 0;
    CROSSDOCK_UNROLL
    for (uint32_t i = 0; i < 4; ++i) packed |= static_cast<uint32_t>(float_to_e4m3(values[i])) << (8 * i);
    return packed;
}

// Eight e4m3 elements as floats.
CROSSDOCK_DEVICE void unpack_e4m3(uint64_t packed, float (&values)[8]) {
#if defined(__CUDACC__)
    if constexpr (kHasFp8Conversions) {
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < 8; i += 2) {
            const uint32_t pair = ptx::f16_pair_of_e4m3(static_cast<uint16_t>(packed >> (8 * i)));
            values[i] = f16_to_float(static_cast<uint16_t>(pair));
            values[i + 1] = f16_to_float(static_cast<uint16_t>(pair >> 16));
        }
        return;
    }
#endif
    CROSSDOCK_UNROLL
    for (uint32_t i = 0; i < 8; ++i) values[i] = e4m3_to_float(static_cast<uint8_t>(packed >> (8 * i)));
}

// values * multiplier as e4m3, four to a 32-bit word.
template <uint32_t kNum>
CROSSDOCK_DEVICE void store_e4m3(const float (&values)[kNum], float multiplier, std::byte* target) {
    static_assert(kNum > 0 && kNum % 4 == 0, "whole words of four are stored: fewer values would be left out");
    for (uint32_t word = 0; word < kNum / 4; ++word) {
        float scaled[4];
        for (uint32_t i = 0; i < 4; ++i) scaled[i] = values[4 * word + i] * multiplier;
        reinterpret_cast<uint32_t*>(target)[word] = packed_e4m3(scaled);
    }
}

}  // namespace
}  // namespace crossdock
