// SPDX-License-Identifier: Apache-2.0
// The quantisation recipes of LL, and how a combine quantises a row; a dispatch does it in dispatch_send.h. What
// callers pass for each: core/recipes.h. How to add one: CONTRIBUTING.md.
#pragma once

#include "device/fp8.h"
#include "device/nvfp4.h"
#include "nccl_ep/ep_enums.h"

namespace crossdock {

// What a dispatch sends: unchanged rows (NONE, FWD), or rows quantised to FP8.
enum class LlDispatchWire : uint32_t { kBytes, kFp8 };

constexpr LlDispatchWire ll_wire_of(ncclEpDispQuant_t recipe) {
    return recipe == NCCL_EP_DISP_QUANT_DS_FP8E3M4 ? LlDispatchWire::kFp8 : LlDispatchWire::kBytes;
}

// What a combine sends: unchanged rows, or a rank's sum of its rows of a token; from kNvfp4 on, quantised bf16 rows.
enum class LlCombineWire : uint32_t { kRows, kSums, kNvfp4 };

constexpr LlCombineWire ll_wire_of(ncclEpCombQuant_t recipe) {
    return recipe == NCCL_EP_COMB_QUANT_NVFP4 ? LlCombineWire::kNvfp4 : LlCombineWire::kRows;
}

CROSSDOCK_HOST_DEVICE constexpr bool is_quantised(LlCombineWire wire) { return wire >= LlCombineWire::kNvfp4; }

// A multiple of 16, and at most the bytes of the bf16 row, whose cell it uses.
constexpr uint32_t quantised_row_bytes(LlCombineWire wire, uint32_t elements) {
    switch (wire) {
        case LlCombineWire::kRows:
        case LlCombineWire::kSums:
            break;
        case LlCombineWire::kNvfp4:
            return nvfp4_wire_bytes(elements);
    }
    return 0;
}

namespace {

// One warp. scales: the caller's, one per row, for recipes that take them.
CROSSDOCK_DEVICE void quantise_row(const Ctx& ctx, LlCombineWire wire, const std::byte* row, uint32_t elements,
                                   const float* scales, int64_t row_idx, std::byte* target) {
    switch (wire) {
        case LlCombineWire::kRows:
        case LlCombineWire::kSums:
            break;
        case LlCombineWire::kNvfp4:
            quantise_nvfp4(ctx, row, elements, scales[row_idx], target);
            break;
    }
}

CROSSDOCK_DEVICE float quantised_element(LlCombineWire wire, const std::byte* row, uint32_t elements, uint32_t e) {
    switch (wire) {
        case LlCombineWire::kRows:
        case LlCombineWire::kSums:
            break;
        case LlCombineWire::kNvfp4:
            return nvfp4_element(row, elements, e) * nvfp4_inverse_scale(row, elements);
    }
    return 0.0f;
}

}  // namespace
}  // namespace crossdock
