// SPDX-License-Identifier: Apache-2.0
// The quantisation recipes of low latency in plain loops. Random problems draw a combine recipe from the list here, a
// dispatch recipe in random_ll_recipe (random_problem.cpp).
#pragma once

#include "problem.h"

namespace crossdock::reference {

// Dispatch. A recipe that computes scales takes bf16 rows and makes one fp32 scale per block of elements.

const char* name_of(Recipe recipe);
ncclEpDispQuant_t quant_recipe(Recipe recipe);  // what a caller passes
bool computes_scales(Recipe recipe);
size_t scale_block(Recipe recipe);
ncclDataType_t received_type(Recipe recipe, ncclDataType_t token_type);

struct QuantisedRow {
    std::vector<std::byte> tokens;
    std::vector<std::byte> scales;
};
QuantisedRow quantised(const Problem& problem, const std::vector<std::byte>& row);

// Combine. Rows that are quantised are bf16.

inline constexpr ncclEpCombQuant_t kQuantisedCombines[] = {NCCL_EP_COMB_QUANT_NVFP4};

const char* name_of(ncclEpCombQuant_t recipe);
size_t row_multiple(ncclEpCombQuant_t recipe);    // elements
bool takes_row_scales(ncclEpCombQuant_t recipe);  // one fp32 per row, from the caller
float row_scale(const std::vector<float>& row);   // what the caller passes
// The largest error of each element, whatever the order of the multiplications.
std::vector<double> quantisation_errors(ncclEpCombQuant_t recipe, const std::vector<float>& row);

}  // namespace crossdock::reference
