// SPDX-License-Identifier: Apache-2.0
// FP8 rows of a dispatch: e4m3 elements, and one fp32 scale per block of 128.
#pragma once

#include "device/context.h"
#include "device/numeric.h"

namespace crossdock {

inline constexpr uint32_t kFp8Block = 128;

namespace {

// A lane's share of some of a row's blocks of bf16 elements.
struct Fp8Blocks {
    static constexpr uint32_t kMost = kLanes > 1 ? 8 : 1;
    static constexpr uint32_t kPerLane = kFp8Block / kLanes;
    static_assert(kPerLane * kLanes == kFp8Block && kPerLane % 4 == 0, "the lanes' shares are whole words");
    static_assert(kMost <= kLanes, "a lane computes a block's scale");
    uint64_t words[kMost][kPerLane / 4];

    // One warp. Loads blocks first, first + step, ... below num, at most kMost. All loads are issued before one is
    // used.
    CROSSDOCK_DEVICE void load(const Ctx& ctx, const std::byte* row, uint32_t first, uint32_t step, uint32_t num) {
        CROSSDOCK_UNROLL
        for (uint32_t j = 0; j < kMost; ++j) {
            const uint32_t block = first + j * step < num ? first + j * step : first;
            const std::byte* share = row + 2 * (block * kFp8Block + ctx.lane() * kPerLane);
            for (uint32_t i = 0; i < kPerLane / 4; ++i) words[j][i] = reinterpret_cast<const uint64_t*>(share)[i];
        }
    }
    // The same blocks. target: a byte per element of the row; scales: one per block.
    CROSSDOCK_DEVICE void quantise(const Ctx& ctx, bool round_scales, std::byte* target, float* scales, uint32_t first,
                                   uint32_t step, uint32_t num) const {
        float largest[kMost];
        CROSSDOCK_UNROLL
        for (uint32_t j = 0; j < kMost; ++j) {
            largest[j] = 1e-4f;
            for (uint32_t i = 0; i < kPerLane; ++i) largest[j] = larger(largest[j], absolute(element(j, i)));
            // Positive numbers order as their bits do.
            largest[j] = float_of(ctx.warp_max(bits_of(largest[j])));
        }
        // Divisions take long: each lane has one, for a block of its own.
        const uint32_t lane = ctx.lane();
        float largest_of_lane = largest[0];
        CROSSDOCK_UNROLL
        for (uint32_t j = 1; j < kMost; ++j) {
            if (lane == j) largest_of_lane = largest[j];
        }
        const Scaling scaling = scaling_for(largest_of_lane, round_scales);
        const uint32_t block_of_lane = first + lane * step;
        if (lane < kMost && block_of_lane < num) scales[block_of_lane] = scaling.scale;
        float multipliers[kMost];
        CROSSDOCK_UNROLL
        for (uint32_t j = 0; j < kMost; ++j)
            multipliers[j] = float_of(ctx.warp_broadcast_from(j, bits_of(scaling.multiplier)));
        CROSSDOCK_UNROLL
        for (uint32_t j = 0; j < kMost; ++j) {
            const uint32_t block = first + j * step;
            if (block >= num) break;
            float values[kPerLane];
            for (uint32_t i = 0; i < kPerLane; ++i) values[i] = element(j, i);
            store_e4m3(values, multipliers[j], target + block * kFp8Block + lane * kPerLane);
        }
    }

  private:
    struct Scaling {
        float scale;
        float multiplier;
    };
    CROSSDOCK_DEVICE static Scaling scaling_for(float largest, bool round_scales) {
        const float scale = largest * (1.0f / 448.0f);  // not divided, for the same bits as DeepEP's
        if (!round_scales) return {scale, 448.0f / largest};
        // Round up to a power of two: the exponent, plus one if the mantissa is not 0.
        const uint32_t exponent = (bits_of(scale) >> 23) + ((bits_of(scale) & 0x7FFFFFu) != 0 ? 1u : 0u);
        const float rounded = float_of(exponent << 23);
        return {rounded, 1.0f / rounded};
    }
    CROSSDOCK_DEVICE float element(uint32_t j, uint32_t i) const {
        return element_of<DType::kBf16>(words[j][i / 4], i % 4);
    }
};

}  // namespace
}  // namespace crossdock
