// SPDX-License-Identifier: Apache-2.0
// Weighted sums of rows: out[e] = sum over i of weight[i] * row[i][e], i ascending, fp32 fused multiply-adds from 0,
// one rounding. The same bits in every world.
#pragma once

#include "device/context.h"
#include "device/numeric.h"
#if !defined(__CUDACC__)
#include "device/cpu/sum_rows.h"
#endif

namespace crossdock {
inline namespace CROSSDOCK_WORLD {

// Row i is base + index[i] * stride; index[i] < 0: no such row.
struct RowTerms {
    const std::byte* base;
    uint64_t stride;
    const int64_t* index;
    const float* weight;
    uint32_t count;
};

// Elements [first, first + num) by one warp; out is the row's beginning. num and first are multiples of the elements in
// 16 bytes.
template <DType kDType>
CROSSDOCK_DEVICE void sum_rows(const Ctx& ctx, const RowTerms& terms, uint32_t first, uint32_t num, std::byte* out) {
#if defined(__CUDACC__)
    constexpr uint32_t kPerVector = 16 / dtype_bytes(kDType);
    for (uint32_t at = first + static_cast<uint32_t>(ctx.lane()) * kPerVector; at < first + num;
         at += kLanes * kPerVector) {
        float sums[kPerVector] = {};
        for (uint32_t i = 0; i < terms.count; ++i) {
            if (terms.index[i] < 0) continue;
            const std::byte* row = terms.base + static_cast<uint64_t>(terms.index[i]) * terms.stride;
            const uint4 vector = *reinterpret_cast<const uint4*>(row + uint64_t{at} * dtype_bytes(kDType));
            const std::byte* elements = reinterpret_cast<const std::byte*>(&vector);
            for (uint32_t e = 0; e < kPerVector; ++e) {
                sums[e] = fused_multiply_add(terms.weight[i], load_element<kDType>(elements, e), sums[e]);
            }
        }
        uint4 result;
        for (uint32_t e = 0; e < kPerVector; ++e)
            store_element<kDType>(reinterpret_cast<std::byte*>(&result), e, sums[e]);
        *reinterpret_cast<uint4*>(out + uint64_t{at} * dtype_bytes(kDType)) = result;
    }
#else
    static_cast<void>(ctx);
    const std::byte* rows[64];
    float weights[64];
    uint32_t count = 0;
    for (uint32_t i = 0; i < terms.count; ++i) {
        if (terms.index[i] < 0) continue;
        rows[count] = terms.base + static_cast<uint64_t>(terms.index[i]) * terms.stride;
        weights[count++] = terms.weight[i];
    }
    cpu::sum_rows(kDType, rows, weights, count, first, num, out);
#endif
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
