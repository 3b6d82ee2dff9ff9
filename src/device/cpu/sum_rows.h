// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/numeric.h"

namespace crossdock::cpu {

// Elements [first, first + num) of out = sum of weights[i] * rows[i], as device/sum_rows.h defines it; count at
// most 64.
void sum_rows(DType dtype, const std::byte* const* rows, const float* weights, uint32_t count, uint32_t first,
              uint32_t num, std::byte* out);

}  // namespace crossdock::cpu
