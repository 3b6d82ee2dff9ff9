// SPDX-License-Identifier: Apache-2.0
// bfloat16 as its 16 bits: the upper half of a float.
#pragma once

#include <bit>
#include <cstdint>

namespace crossdock::tools {

// Unit roundoff: rounding to bfloat16 (8 significant bits) changes a value by at most this part of it.
inline constexpr double kBfloat16Roundoff = 0x1p-8;

inline float bfloat16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// To the nearest, ties to even; finite values only.
inline uint16_t float_to_bfloat16(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float round_to_bfloat16(float value) { return bfloat16_to_float(float_to_bfloat16(value)); }

}  // namespace crossdock::tools
