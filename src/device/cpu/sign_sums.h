// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device/numeric.h"

namespace crossdock {
struct SignSums;
}

namespace crossdock::cpu {

// What device/sign_sums.h says, for a whole chunk. Sum: float or double.
template <typename Sum>
void sign_sums(DType dtype, const std::byte* entries, uint32_t count, SignSums& sums);

void shift_by_sign(DType dtype, std::byte* entries, uint32_t count, float up, float down);

}  // namespace crossdock::cpu
