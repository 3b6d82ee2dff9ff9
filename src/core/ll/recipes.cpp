// SPDX-License-Identifier: Apache-2.0
#include "core/ll/recipes.h"

#include <algorithm>
#include <string>

#include "core/error.h"
#include "core/tensor.h"
#include "kernels/agreement.h"

namespace crossdock {
namespace {

constexpr LlDispatchRecipe kDispatchRecipes[] = {
    {.value = NCCL_EP_DISP_QUANT_NONE, .name = "none", .wire = LlDispatchWire::kBytes},
    {.value = NCCL_EP_DISP_QUANT_FWD, .name = "forward", .wire = LlDispatchWire::kBytes, .forwards_scales = true},
    {.value = NCCL_EP_DISP_QUANT_DS_FP8E3M4,
     .name = "FP8",
     .wire = LlDispatchWire::kFp8,
     .scale_block = kFp8Block,
     .token_type = ncclBfloat16,
     .received_type = ncclFloat8e4m3,
     .scale_type = ncclFloat32},
};

constexpr LlCombineRecipe kCombineRecipes[] = {
    {.value = NCCL_EP_COMB_QUANT_NONE, .name = "none", .wire = LlCombineWire::kRows},
    {.value = NCCL_EP_COMB_QUANT_NVFP4,
     .name = "NVFP4",
     .wire = LlCombineWire::kNvfp4,
     .row_multiple = 2 * kNvfp4Block,
     .takes_row_scales = true},
};

constexpr auto kFitsTheTerm = [](const auto& recipe) { return recipe.value < kRoundedScales; };
static_assert(std::ranges::all_of(kDispatchRecipes, kFitsTheTerm) && std::ranges::all_of(kCombineRecipes, kFitsTheTerm),
              "Term::kRecipe holds a recipe and, beside it, kRoundedScales");

template <typename Recipe, size_t kNum>
const Recipe& find_recipe(const Recipe (&recipes)[kNum], unsigned int bits, const char* hint) {
    for (const Recipe& recipe : recipes) {
        if (static_cast<unsigned int>(recipe.value) == bits) return recipe;
    }
    std::string allowed;
    for (const Recipe& recipe : recipes) {
        allowed +=
            fmt::format("{}{} ({})", allowed.empty() ? "" : ", ", static_cast<unsigned int>(recipe.value), recipe.name);
    }
    fail(ncclInvalidArgument, "config->quant_recipe is {}, allowed in LL mode: {}{}", bits, allowed, hint);
}

}  // namespace

const LlDispatchRecipe& ll_dispatch_recipe(unsigned int bits) { return find_recipe(kDispatchRecipes, bits, ""); }
const LlCombineRecipe& ll_combine_recipe(unsigned int bits) {
    return find_recipe(kCombineRecipes, bits, "; 2 (MXFP8) is for HT expert-major");
}

void expect_no_scales(const ncclEpTensor_t* caller, const char* name, const char* recipe) {
    if (caller != nullptr) expect_absent(caller, name, fmt::format("with recipe {}", recipe).c_str());
}

}  // namespace crossdock
