// SPDX-License-Identifier: Apache-2.0
// Sums rows by expert into rows by rank, in fp32 and in the order of their columns, and copies their weights back. One
// warp per row.
#pragma once

#include "device/sum_rows.h"
#include "kernels/routing/ids.h"

namespace crossdock {
namespace {

constexpr uint32_t kPartElements = 16 / dtype_bytes(DType::kBf16);  // in 16 bytes of a row

// Elements [first, first + kPartElements) of a row of sums.
CROSSDOCK_DEVICE void store_part(const crossdockReducedRows_t& r, uint64_t first, const float (&sums)[kPartElements]) {
    if (r.sum_type == ncclBfloat16) {
        *reinterpret_cast<Bytes16*>(static_cast<uint16_t*>(r.sums) + first) = packed_sums<DType::kBf16>(sums);
        return;
    }
    auto* parts = reinterpret_cast<Bytes16*>(static_cast<float*>(r.sums) + first);
    CROSSDOCK_UNROLL
    for (uint32_t i = 0; i < kPartElements / 4; ++i)
        parts[i] = {packed_word<DType::kF32>(sums + 4 * i), packed_word<DType::kF32>(sums + 4 * i + 2)};
}

// Rows whose length and addresses are multiples of 16 bytes.
CROSSDOCK_DEVICE void reduce_parts(const Ctx& ctx, const crossdockReducedRows_t& r, uint64_t row) {
    constexpr uint32_t kParts = 4;  // loaded together
    constexpr uint32_t kStep = kPartElements * static_cast<uint32_t>(kLanes);
    const int32_t* places = r.places + row * r.num_topk;
    CROSSDOCK_ROLLED
    for (uint32_t at = static_cast<uint32_t>(ctx.lane()) * kPartElements; at < r.hidden; at += kParts * kStep) {
        float sums[kParts][kPartElements] = {};
        CROSSDOCK_ROLLED
        for (uint32_t k = 0; k < r.num_topk; ++k) {
            const uint32_t place = static_cast<uint32_t>(places[k]);
            if (place >= r.num_expanded) continue;
            const uint16_t* source = static_cast<const uint16_t*>(r.rows) + uint64_t{place} * r.hidden;
            Bytes16 parts[kParts];
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kParts; ++i) {
                const uint32_t own = at + i * kStep;
                parts[i] = own < r.hidden ? *reinterpret_cast<const Bytes16*>(source + own) : Bytes16{};
            }
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kParts; ++i) {
                CROSSDOCK_UNROLL
                for (uint32_t e = 0; e < kPartElements; ++e)
                    sums[i][e] += element_of<DType::kBf16>(e < 4 ? parts[i].low : parts[i].high, e % 4);
            }
        }
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kParts; ++i) {
            const uint32_t own = at + i * kStep;
            if (own < r.hidden) store_part(r, row * r.hidden + own, sums[i]);
        }
    }
}

CROSSDOCK_DEVICE void reduce_elements(const Ctx& ctx, const crossdockReducedRows_t& r, uint64_t row) {
    const int32_t* places = r.places + row * r.num_topk;
    CROSSDOCK_ROLLED
    for (uint32_t i = static_cast<uint32_t>(ctx.lane()); i < r.hidden; i += kLanes) {
        float sum = 0.0F;
        CROSSDOCK_ROLLED
        for (uint32_t k = 0; k < r.num_topk; ++k) {
            const uint32_t place = static_cast<uint32_t>(places[k]);
            if (place >= r.num_expanded) continue;
            sum += bf16_to_float(static_cast<const uint16_t*>(r.rows)[uint64_t{place} * r.hidden + i]);
        }
        if (r.sum_type == ncclBfloat16) {
            static_cast<uint16_t*>(r.sums)[row * r.hidden + i] = float_to_bf16(sum);
        } else {
            static_cast<float*>(r.sums)[row * r.hidden + i] = sum;
        }
    }
}

CROSSDOCK_DEVICE void reduce_rows(const Ctx& ctx, const crossdockReducedRows_t& r) {
    const uintptr_t addresses = reinterpret_cast<uintptr_t>(r.rows) | reinterpret_cast<uintptr_t>(r.sums);
    const bool has_parts = r.hidden % kPartElements == 0 && addresses % 16 == 0;
    CROSSDOCK_ROLLED
    for (uint64_t row = first_warp(ctx); row < r.num_rows; row += num_all_warps(ctx)) {
        has_parts ? reduce_parts(ctx, r, row) : reduce_elements(ctx, r, row);
        if (r.pair_weights == nullptr) continue;
        CROSSDOCK_ROLLED
        for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < r.num_topk; k += kLanes) {
            const uint64_t pair = row * r.num_topk + k;
            const uint32_t place = static_cast<uint32_t>(r.places[pair]);
            r.pair_weights[pair] = place < r.num_expanded ? r.weights[place] : 0.0F;
        }
    }
}

}  // namespace
}  // namespace crossdock
