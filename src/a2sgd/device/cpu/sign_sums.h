// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "device/numeric.h"

namespace crossdock {
struct SignSums;
}

namespace crossdock::cpu {

// As in a2sgd/device/sign_sums.h, for a whole chunk. Sum: float or double.
template <typename Sum>
void sign_sums(DType dtype, const std::byte* entries, uint32_t count, SignSums& sums);

void shift_by_sign(DType dtype, std::byte* entries, uint32_t count, float up, float down);

// The same functions, compiled for one set of instructions: their results have the same bits.
struct SignVariant {
    const char* name;
    void (*sums_in_fp32)(DType, const std::byte*, uint32_t, SignSums&);
    void (*sums_in_fp64)(DType, const std::byte*, uint32_t, SignSums&);
    void (*shift)(DType, std::byte*, uint32_t, float, float);
};
extern const SignVariant kPlainSigns;
#if defined(__x86_64__)
extern const SignVariant kAvx2Signs;    // and F16C
extern const SignVariant kAvx512Signs;  // F, BW, DQ, VL
#endif

// The variants that this processor supports; the functions above use the first one.
std::vector<const SignVariant*> sign_variants();

}  // namespace crossdock::cpu
