// SPDX-License-Identifier: Apache-2.0
#include "formats.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace crossdock::reference {
namespace {

// What happens above the largest finite value.
enum class Overflow { kInfinity, kSaturate };

struct Format {
    int exponent_bits;
    int mantissa_bits;
    double largest;  // finite
    Overflow overflow;
    // The top exponent is for infinities and NaNs as IEEE has it; e4m3 and e2m1 use it for numbers.
    bool ieee_top;

    int bias() const { return (1 << (exponent_bits - 1)) - 1; }
    int smallest_exponent() const { return 1 - bias(); }
    int sign_shift() const { return exponent_bits + mantissa_bits; }
    uint32_t top_exponent() const { return (1u << exponent_bits) - 1; }
};

constexpr Format kBf16{8, 7, 0x1.FEp127, Overflow::kInfinity, true};
constexpr Format kFp16{5, 10, 65504.0, Overflow::kInfinity, true};
constexpr Format kE4m3{4, 3, 448.0, Overflow::kSaturate, false};
constexpr Format kE5m2{5, 2, 57344.0, Overflow::kInfinity, true};
constexpr Format kE2m1{2, 1, 6.0, Overflow::kSaturate, false};

uint32_t encode_bits(const Format& format, float value) {
    const uint32_t sign = std::signbit(value) ? 1u << format.sign_shift() : 0;
    const uint32_t infinity = format.top_exponent() << format.mantissa_bits;
    const double magnitude = std::fabs(static_cast<double>(value));
    if (std::isnan(value)) return sign | infinity | ((1u << format.mantissa_bits) - 1);

    // Below the smallest normal exponent the spacing of the format's numbers stays the same.
    const int exponent = magnitude == 0
                             ? format.smallest_exponent()
                             : std::max(std::isinf(value) ? 1024 : std::ilogb(magnitude), format.smallest_exponent());
    const double spacing = std::ldexp(1.0, exponent - format.mantissa_bits);
    // The quotient is exact, so this is the only rounding: to nearest, ties to even.
    const double rounded = std::isinf(value) ? magnitude : std::nearbyint(magnitude / spacing) * spacing;
    if (rounded > format.largest) {
        if (format.overflow == Overflow::kInfinity) return sign | infinity;
        return encode_bits(format, std::copysign(static_cast<float>(format.largest), value));
    }
    const double smallest_normal = std::ldexp(1.0, format.smallest_exponent());
    if (rounded < smallest_normal) {
        return sign | static_cast<uint32_t>(std::ldexp(rounded, format.mantissa_bits - format.smallest_exponent()));
    }
    const int result_exponent = std::ilogb(rounded);
    const auto significand = static_cast<uint32_t>(std::ldexp(rounded, format.mantissa_bits - result_exponent));
    const auto biased = static_cast<uint32_t>(result_exponent + format.bias());
    return sign | (biased << format.mantissa_bits) | (significand - (1u << format.mantissa_bits));
}

float decode_bits(const Format& format, uint32_t bits) {
    const bool negative = (bits >> format.sign_shift()) & 1;
    const uint32_t biased = (bits >> format.mantissa_bits) & format.top_exponent();
    const uint32_t mantissa = bits & ((1u << format.mantissa_bits) - 1);
    double magnitude = 0;
    if (format.ieee_top && biased == format.top_exponent()) {
        magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
    } else if (&format == &kE4m3 && biased == format.top_exponent() && mantissa == 7) {
        magnitude = std::numeric_limits<double>::quiet_NaN();
    } else if (biased == 0) {
        magnitude = std::ldexp(mantissa, format.smallest_exponent() - format.mantissa_bits);
    } else {
        magnitude = std::ldexp((1u << format.mantissa_bits) + mantissa,
                               static_cast<int>(biased) - format.bias() - format.mantissa_bits);
    }
    return static_cast<float>(negative ? -magnitude : magnitude);
}

const Format& format_of(ncclDataType_t type) {
    switch (static_cast<int>(type)) {
        case ncclBfloat16:
            return kBf16;
        case ncclFloat16:
            return kFp16;
        case ncclFloat8e4m3:
            return kE4m3;
        case ncclFloat8e5m2:
            return kE5m2;
    }
    throw std::logic_error("no small float format for this data type");
}

}  // namespace

size_t type_bytes(ncclDataType_t type) {
    switch (static_cast<int>(type)) {
        case ncclInt64:
            return 8;
        case ncclInt32:
        case ncclFloat32:
            return 4;
        case ncclBfloat16:
        case ncclFloat16:
            return 2;
        default:
            return 1;
    }
}

const char* type_name(ncclDataType_t type) {
    switch (static_cast<int>(type)) {
        case ncclInt32:
            return "int32";
        case ncclInt64:
            return "int64";
        case ncclFloat32:
            return "fp32";
        case ncclBfloat16:
            return "bf16";
        case ncclFloat16:
            return "fp16";
        case ncclFloat8e4m3:
            return "e4m3";
        case ncclFloat8e5m2:
            return "e5m2";
        case ncclUint8:
            return "uint8";
        case 12:
            return "fp4x2";
        default:
            return "another type";
    }
}

double unit_roundoff(ncclDataType_t type) {
    if (type == ncclFloat32) return 0x1p-24;
    return std::ldexp(1.0, -format_of(type).mantissa_bits - 1);
}

double smallest_positive(ncclDataType_t type) {
    if (type == ncclFloat32) return 0x1p-149;
    const Format& format = format_of(type);
    return std::ldexp(1.0, format.smallest_exponent() - format.mantissa_bits);
}

float decode(ncclDataType_t type, const std::byte* element) {
    if (type == ncclFloat32) {
        float value;
        std::memcpy(&value, element, sizeof value);
        return value;
    }
    uint32_t bits = 0;
    std::memcpy(&bits, element, type_bytes(type));
    return decode_bits(format_of(type), bits);
}

void encode(ncclDataType_t type, float value, std::byte* element) {
    if (type == ncclFloat32) {
        std::memcpy(element, &value, sizeof value);
        return;
    }
    const uint32_t bits = encode_bits(format_of(type), value);
    std::memcpy(element, &bits, type_bytes(type));
}

float decode_e2m1(uint8_t bits) { return decode_bits(kE2m1, bits); }
uint8_t encode_e2m1(float value) { return static_cast<uint8_t>(encode_bits(kE2m1, value)); }

}  // namespace crossdock::reference
