// SPDX-License-Identifier: Apache-2.0
// NVFP4 rows of a combine: e2m1 pairs, one e4m3 scale per block of 16 elements, one fp32 scale per row.
#pragma once

#include "device/context.h"
#include "device/numeric.h"

namespace crossdock {

inline constexpr uint32_t kNvfp4Block = 16;

// [elements / 2 payload][elements / 16 block scales][padding][4: row scale], a multiple of 16 bytes. The row scale
// comes last, so that it is aligned for every row of 32 or more elements.
CROSSDOCK_HOST_DEVICE constexpr uint32_t nvfp4_wire_bytes(uint32_t elements) {
    return (elements / 2 + elements / kNvfp4Block + 4 + 15) / 16 * 16;
}
CROSSDOCK_HOST_DEVICE constexpr uint32_t nvfp4_row_scale_offset(uint32_t elements) {
    return nvfp4_wire_bytes(elements) - 4;
}

namespace {

// One warp. Quantises a bf16 row. row_scale: 2688 / largest magnitude of the row, or 0 for a row of zeros.
CROSSDOCK_DEVICE void quantise_nvfp4(const Ctx& ctx, const std::byte* row, uint32_t elements, float row_scale,
                                     std::byte* wire) {
    CROSSDOCK_ROLLED
    for (uint32_t block = ctx.lane(); block < elements / kNvfp4Block; block += kLanes) {
        float values[kNvfp4Block];
        float largest = 0.0f;
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < kNvfp4Block; ++i) {
            values[i] = load_element<DType::kBf16>(row, block * kNvfp4Block + i);
            largest = larger(largest, absolute(values[i]));
        }
        const uint8_t scale_bits = float_to_e4m3(row_scale * largest / 6.0f);
        const float scale = e4m3_to_float(scale_bits);
        CROSSDOCK_ROLLED
        for (uint32_t i = 0; i < kNvfp4Block; i += 2) {
            const uint8_t low = scale == 0.0f ? 0 : float_to_e2m1(values[i] * row_scale / scale);
            const uint8_t high = scale == 0.0f ? 0 : float_to_e2m1(values[i + 1] * row_scale / scale);
            wire[(block * kNvfp4Block + i) / 2] = static_cast<std::byte>(low | high << 4);
        }
        wire[elements / 2 + block] = static_cast<std::byte>(scale_bits);
    }
    if (is_leader(ctx)) *reinterpret_cast<uint32_t*>(wire + nvfp4_row_scale_offset(elements)) = bits_of(row_scale);
}

// Element e of a wire row, before the row's scale.
CROSSDOCK_DEVICE float nvfp4_element(const std::byte* wire, uint32_t elements, uint32_t e) {
    const uint8_t pair = static_cast<uint8_t>(wire[e / 2]);
    const float scale = e4m3_to_float(static_cast<uint8_t>(wire[elements / 2 + e / kNvfp4Block]));
    return e2m1_to_float((e & 1) != 0 ? pair >> 4 : pair & 15) * scale;
}

// The inverse of the row's scale: 1 / row_scale, or 1 if that is infinite.
CROSSDOCK_DEVICE float nvfp4_inverse_scale(const std::byte* wire, uint32_t elements) {
    const float row_scale = float_of(*reinterpret_cast<const uint32_t*>(wire + nvfp4_row_scale_offset(elements)));
    const float inverse = 1.0f / row_scale;
    return bits_of(absolute(inverse)) == 0x7F800000u ? 1.0f : inverse;
}

}  // namespace
}  // namespace crossdock
