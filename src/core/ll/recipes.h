// SPDX-License-Identifier: Apache-2.0
// What callers pass for each LL quantisation recipe. How rows are quantised: kernels/ll/recipes.h.
#pragma once

#include "kernels/ll/recipes.h"
#include "nccl_ep.h"

namespace crossdock {

struct LlDispatchRecipe {
    ncclEpDispQuant_t value;
    const char* name;  // in messages
    LlDispatchWire wire;
    bool forwards_scales = false;  // inputs->scales travel with the rows
    // For recipes that compute scales, 4 bytes each; other recipes do not change the rows' type.
    uint32_t scale_block = 0;  // elements that share a scale
    ncclDataType_t token_type{};
    ncclDataType_t received_type{};
    ncclDataType_t scale_type{};

    bool computes_scales() const { return scale_block > 0; }
};

struct LlCombineRecipe {
    ncclEpCombQuant_t value;
    const char* name;
    LlCombineWire wire;
    // For recipes that quantise; their rows are bf16.
    uint32_t row_multiple = 1;      // elements
    bool takes_row_scales = false;  // inputs->scales: one fp32 per row
};

// InvalidArgument for bits that are no LL recipe.
const LlDispatchRecipe& ll_dispatch_recipe(unsigned int bits);
const LlCombineRecipe& ll_combine_recipe(unsigned int bits);

void expect_no_scales(const ncclEpTensor_t* caller, const char* name, const char* recipe);

}  // namespace crossdock
