// SPDX-License-Identifier: Apache-2.0
// The quantisation recipes: what each is called, which mode has it, and which tensors callers pass for it. Plain data
// on top of the public header: the library, Python's enums, the benchmark's options, the tests and the fuzzer read
// these tables. How rows are quantised: kernels/ll/recipes.h, kernels/ht/recipes.h. How to add a recipe:
// CONTRIBUTING.md.
#pragma once

#include <cstddef>
#include <span>

#include "nccl_ep.h"

namespace crossdock {

struct DispatchRecipe {
    ncclEpDispQuant_t value;
    const char* name;     // behind NCCL_EP_DISP_QUANT_, and in Python
    const char* label;    // in messages
    const char* option;   // of command lines
    const char* meaning;  // in Python's help
    bool in_ll = false;
    bool in_ht = false;
    bool forwards_scales = false;  // inputs->scales travel with the rows
    // For recipes that compute scales, 4 bytes each; other recipes do not change the rows' type.
    unsigned int scale_block = 0;  // elements that share a scale
    ncclDataType_t token_type{};
    ncclDataType_t received_type{};
    ncclDataType_t scale_type{};

    constexpr bool is_in(ncclEpAlgorithm_t mode) const { return mode == NCCL_EP_ALGO_LOW_LATENCY ? in_ll : in_ht; }
    constexpr bool computes_scales() const { return scale_block > 0; }
};

inline constexpr DispatchRecipe kDispatchRecipes[] = {
    {.value = NCCL_EP_DISP_QUANT_NONE,
     .name = "NONE",
     .label = "none",
     .option = "none",
     .meaning = "Rows travel as they are; no scales.",
     .in_ll = true,
     .in_ht = true},
    {.value = NCCL_EP_DISP_QUANT_FWD,
     .name = "FWD",
     .label = "forward",
     .option = "fwd",
     .meaning = "Quantised rows and their scales travel unchanged.",
     .in_ll = true,
     .in_ht = true,
     .forwards_scales = true},
    {.value = NCCL_EP_DISP_QUANT_DS_FP8E3M4,
     .name = "DS_FP8E3M4",
     .label = "FP8",
     .option = "fp8",
     .meaning = "bf16 is quantised to e4m3, a scale for 128 elements.",
     .in_ll = true,
     .scale_block = 128,
     .token_type = ncclBfloat16,
     .received_type = ncclFloat8e4m3,
     .scale_type = ncclFloat32},
};

struct CombineRecipe {
    ncclEpCombQuant_t value;
    const char* name;  // as above
    const char* label;
    const char* option;
    const char* meaning;
    bool in_ll = false;
    bool in_ht = false;
    // For recipes that quantise; their rows are bf16.
    unsigned int row_multiple = 1;  // elements
    unsigned int wire_bytes = 0;    // of row_multiple elements and their scales, beside what a row has once
    bool takes_row_scales = false;  // inputs->scales: one fp32 per row
    std::span<const int> compute_capabilities{};  // 10 * major + minor of the GPUs that can; empty: all
    // HT.
    bool needs_expert_major = false;
    bool needs_one_team = false;  // all ranks in one LSA team

    constexpr bool is_in(ncclEpAlgorithm_t mode) const { return mode == NCCL_EP_ALGO_LOW_LATENCY ? in_ll : in_ht; }
    constexpr bool quantises() const { return wire_bytes > 0; }
};

inline constexpr int kConvertsToE2m1[] = {100, 103, 110, 120, 121};

inline constexpr CombineRecipe kCombineRecipes[] = {
    {.value = NCCL_EP_COMB_QUANT_NONE,
     .name = "NONE",
     .label = "none",
     .option = "none",
     .meaning = "Rows travel as they are.",
     .in_ll = true,
     .in_ht = true},
    {.value = NCCL_EP_COMB_QUANT_NVFP4,
     .name = "NVFP4",
     .label = "NVFP4",
     .option = "nvfp4",
     .meaning = "bf16 rows travel as 4-bit floats with scales; low latency.",
     .in_ll = true,
     .row_multiple = 32,
     .wire_bytes = 18,
     .takes_row_scales = true,
     .compute_capabilities = kConvertsToE2m1},
    {.value = NCCL_EP_COMB_QUANT_MXFP8,
     .name = "MXFP8",
     .label = "MXFP8",
     .option = "mxfp8",
     .meaning = "bf16 rows travel as e4m3 with a power of two per 32 elements; high throughput, expert-major.",
     .in_ht = true,
     .row_multiple = 32,
     .wire_bytes = 33,
     .needs_expert_major = true,
     .needs_one_team = true},
};

// Of values in the tables.
constexpr const DispatchRecipe& recipe_of(ncclEpDispQuant_t value) {
    for (const DispatchRecipe& recipe : kDispatchRecipes) {
        if (recipe.value == value) return recipe;
    }
    return kDispatchRecipes[0];
}
constexpr const CombineRecipe& recipe_of(ncclEpCombQuant_t value) {
    for (const CombineRecipe& recipe : kCombineRecipes) {
        if (recipe.value == value) return recipe;
    }
    return kCombineRecipes[0];
}

}  // namespace crossdock
