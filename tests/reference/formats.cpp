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

// Of normal numbers, from and to the bits of a double: what ldexp(1, exponent) and ilogb are, without their calls.
double power_of_two(int exponent) {
    const uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
    double power;
    std::memcpy(&power, &bits, sizeof power);
    return power;
}

int exponent_of(double magnitude) {
    uint64_t bits;
    std::memcpy(&bits, &magnitude, sizeof bits);
    return static_cast<int>(bits >> 52) - 1023;
}

// To the nearest integer, ties to even, as every double of this size is one.
double nearest_integer(double small) { return (small + 0x1p52) - 0x1p52; }

uint32_t encode_bits(const Format& format, float value) {
    const uint32_t sign = std::signbit(value) ? 1u << format.sign_shift() : 0;
    const uint32_t infinity = format.top_exponent() << format.mantissa_bits;
    const double magnitude = std::fabs(static_cast<double>(value));
    if (std::isnan(value)) return sign | infinity | ((1u << format.mantissa_bits) - 1);

    // Below the smallest normal exponent the spacing of the format's numbers stays the same.
    const int exponent = std::max(exponent_of(magnitude), format.smallest_exponent());
    const double spacing = power_of_two(exponent - format.mantissa_bits);
    // The quotient is exact, so this is the only rounding.
    const double rounded = std::isinf(value) ? magnitude : nearest_integer(magnitude / spacing) * spacing;
    if (rounded > format.largest) {
        if (format.overflow == Overflow::kInfinity) return sign | infinity;
        return encode_bits(format, std::copysign(static_cast<float>(format.largest), value));
    }
    if (rounded < power_of_two(format.smallest_exponent())) return sign | static_cast<uint32_t>(rounded / spacing);
    const int result_exponent = exponent_of(rounded);
    const auto significand = static_cast<uint32_t>(rounded / power_of_two(result_exponent - format.mantissa_bits));
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
        magnitude = mantissa * power_of_two(format.smallest_exponent() - format.mantissa_bits);
    } else {
        magnitude = ((1u << format.mantissa_bits) + mantissa) *
                    power_of_two(static_cast<int>(biased) - format.bias() - format.mantissa_bits);
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

// What every pattern of bits says, of formats with 8 and 16 bits.
const std::vector<float>& table_of(ncclDataType_t type) {
    static const auto make = [](const Format& format) {
        std::vector<float> table(size_t{2} << format.sign_shift());
        for (size_t bits = 0; bits < table.size(); ++bits)
            table[bits] = decode_bits(format, static_cast<uint32_t>(bits));
        return table;
    };
    static const std::vector<float> bf16 = make(kBf16), fp16 = make(kFp16), e4m3 = make(kE4m3), e5m2 = make(kE5m2);
    const Format& format = format_of(type);
    return &format == &kBf16 ? bf16 : &format == &kFp16 ? fp16 : &format == &kE4m3 ? e4m3 : e5m2;
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
        case ncclInt8:
            return "int8";
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

std::vector<float> decoded(ncclDataType_t type, const std::vector<std::byte>& row) {
    std::vector<float> values(row.size() / type_bytes(type));
    if (type == ncclFloat32) {
        std::memcpy(values.data(), row.data(), row.size());
        return values;
    }
    const float* table = table_of(type).data();
    const auto* bytes = reinterpret_cast<const uint8_t*>(row.data());
    if (type_bytes(type) == 1) {
        for (size_t i = 0; i < values.size(); ++i) values[i] = table[bytes[i]];
    } else {
        for (size_t i = 0; i < values.size(); ++i) values[i] = table[bytes[2 * i] | bytes[2 * i + 1] << 8];
    }
    return values;
}

std::vector<std::byte> encoded(ncclDataType_t type, const std::vector<float>& values) {
    const size_t element_bytes = type_bytes(type);
    std::vector<std::byte> row(values.size() * element_bytes);
    if (type == ncclFloat32) {
        std::memcpy(row.data(), values.data(), row.size());
        return row;
    }
    const Format& format = format_of(type);
    for (size_t i = 0; i < values.size(); ++i) {
        const uint32_t bits = encode_bits(format, values[i]);
        std::memcpy(&row[i * element_bytes], &bits, element_bytes);
    }
    return row;
}

float decode_e2m1(uint8_t bits) { return decode_bits(kE2m1, bits); }
uint8_t encode_e2m1(float value) { return static_cast<uint8_t>(encode_bits(kE2m1, value)); }

Mxfp8Row through_mxfp8(const std::vector<float>& values) {
    Mxfp8Row row{std::vector<float>(values.size()), std::vector<float>(values.size() / 32)};
    for (size_t block = 0; block < row.scales.size(); ++block) {
        double largest = 0;
        for (size_t i = 0; i < 32; ++i) largest = std::max<double>(largest, std::fabs(values[32 * block + i]));
        int exponent = -127;
        while (largest > std::ldexp(448.0, exponent)) ++exponent;
        row.scales[block] = std::ldexp(1.0f, exponent);
        for (size_t i = 32 * block; i < 32 * (block + 1); ++i) {
            const auto scaled = static_cast<float>(std::ldexp(double{values[i]}, -exponent));
            row.elements[i] = decode_bits(kE4m3, encode_bits(kE4m3, scaled));
        }
    }
    return row;
}

}  // namespace crossdock::reference
