// SPDX-License-Identifier: Apache-2.0
// The quantisation recipes of low latency in plain loops; that of high throughput is in ht_combine.cpp. Which recipes
// there are, and which tensors they take: src/core/recipes.h.
#pragma once

#include "problem.h"

namespace crossdock::reference {

// Dispatch. A recipe that computes scales takes bf16 rows and makes one fp32 scale per block of elements.

struct QuantisedRow {
    std::vector<std::byte> tokens;
    std::vector<std::byte> scales;
};
QuantisedRow quantised(const Problem& problem, const std::vector<std::byte>& row);

// Combine. Rows that are quantised are bf16.

float row_scale(const std::vector<float>& row);  // what the caller passes, for recipes that take row scales
// The largest error of each element, whatever the order of the multiplications.
std::vector<double> quantisation_errors(ncclEpCombQuant_t recipe, const std::vector<float>& row);

}  // namespace crossdock::reference
