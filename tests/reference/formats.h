// SPDX-License-Identifier: Apache-2.0
// Number formats as their definitions read: sign, exponent, mantissa, round to nearest even. Slow and plain on purpose;
// nothing here is shared with the library. Rows look the same numbers up in tables made of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "nccl_ep.h"

namespace crossdock::reference {

// Bytes of one element; a packed pair of 4-bit floats counts as one.
size_t type_bytes(ncclDataType_t type);
const char* type_name(ncclDataType_t type);

// The largest relative error of one rounding to bf16, fp16 or fp32, and the smallest positive value (an absolute error
// of half of it covers subnormal results).
double unit_roundoff(ncclDataType_t type);
double smallest_positive(ncclDataType_t type);

// One element of bf16, fp16, fp32, e4m3 or e5m2. Finite values beyond the range become infinite in bf16, fp16 and e5m2,
// and the largest finite value in e4m3, which has no infinity.
float decode(ncclDataType_t type, const std::byte* element);
void encode(ncclDataType_t type, float value, std::byte* element);

// All elements of a row.
std::vector<float> decoded(ncclDataType_t type, const std::vector<std::byte>& row);
std::vector<std::byte> encoded(ncclDataType_t type, const std::vector<float>& values);

// The 4-bit float: sign, two bits of exponent, one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6. Saturates.
float decode_e2m1(uint8_t bits);
uint8_t encode_e2m1(float value);

// What is left of values after the trip through MXFP8: of each 32, e4m3 of the value by the smallest power of two,
// 2^-127 at least, by which the largest magnitude becomes at most 448; and that power. All values must be finite.
struct Mxfp8Row {
    std::vector<float> elements;
    std::vector<float> scales;  // one per 32 elements
};
Mxfp8Row through_mxfp8(const std::vector<float>& values);

}  // namespace crossdock::reference
