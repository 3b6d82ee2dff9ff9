// SPDX-License-Identifier: Apache-2.0
// Weighted sums of rows: out[e] = sum over i of weight[i] * row[i][e], i ascending, fp32 fused multiply-adds from 0,
// one rounding. The same bits on every backend.
#pragma once

#include <type_traits>

#include "device/context.h"
#include "device/numeric.h"
#if !defined(__CUDACC__)
#include "device/cpu/sum_rows.h"
#endif

namespace crossdock {
namespace {

// Row i is base + index[i] * stride; index[i] < 0: no such row.
struct RowSummands {
    const std::byte* base;
    uint64_t stride;
    const int64_t* index;
    const float* weights;
    uint32_t count;

    CROSSDOCK_DEVICE const std::byte* row(uint32_t i) const {
        return index[i] < 0 ? nullptr : base + static_cast<uint64_t>(index[i]) * stride;
    }
    CROSSDOCK_DEVICE float weight(uint32_t i) const { return weights[i]; }
};

// Rows by their addresses as integers; 0: no such row.
struct AddressSummands {
    const int64_t* addresses;
    const float* weights;
    uint32_t count;

    CROSSDOCK_DEVICE const std::byte* row(uint32_t i) const {
        return reinterpret_cast<const std::byte*>(static_cast<uintptr_t>(addresses[i]));
    }
    CROSSDOCK_DEVICE float weight(uint32_t i) const { return weights[i]; }
};

// Rows by their addresses, each with weight 1.
struct PointerSummands {
    const std::byte* const* rows;
    uint32_t count;

    CROSSDOCK_DEVICE const std::byte* row(uint32_t i) const { return rows[i]; }
    CROSSDOCK_DEVICE float weight(uint32_t) const { return 1.0f; }
};

template <DType kDType>
CROSSDOCK_DEVICE void add_weighted(const Bytes16& part, float weight, float (&sums)[16 / dtype_bytes(kDType)]) {
    constexpr uint32_t kPerWord = 8 / dtype_bytes(kDType);
    CROSSDOCK_UNROLL
    for (uint32_t e = 0; e < 2 * kPerWord; ++e) {
        const uint64_t packed = e < kPerWord ? part.low : part.high;
        sums[e] = fused_multiply_add(weight, element_of<kDType>(packed, e % kPerWord), sums[e]);
    }
}

template <DType kDType>
CROSSDOCK_DEVICE uint64_t packed_word(const float* values) {
#if defined(__CUDACC__)
    if constexpr (kDType == DType::kBf16)
        return uint64_t{ptx::bf16_pair_of(values[2], values[3])} << 32 | ptx::bf16_pair_of(values[0], values[1]);
    if constexpr (kDType == DType::kF16)
        return uint64_t{ptx::f16_pair_of(values[2], values[3])} << 32 | ptx::f16_pair_of(values[0], values[1]);
#endif
    uint64_t word = 0;
    CROSSDOCK_UNROLL
    for (uint32_t i = 0; i < 8 / dtype_bytes(kDType); ++i) word |= packed_element<kDType>(values[i], i);
    return word;
}

template <DType kDType>
CROSSDOCK_DEVICE Bytes16 packed_sums(const float (&sums)[16 / dtype_bytes(kDType)]) {
    return {packed_word<kDType>(sums), packed_word<kDType>(sums + 8 / dtype_bytes(kDType))};
}

// A warp's part of a sum whose rows are added one after the other.
template <DType kDType>
class PartSum {
  public:
    static constexpr uint32_t kMostBytes = 2048;

    // Adds that part of some rows, in this order. bytes: a multiple of 16, the same for all rows.
    template <uint32_t kRows>
    CROSSDOCK_DEVICE void add(const Ctx& ctx, const std::byte* const (&parts)[kRows], uint32_t bytes) {
        Bytes16 words[kRows][kVectors];  // all loads are issued before the first is added
        CROSSDOCK_UNROLL
        for (uint32_t row = 0; row < kRows; ++row) {
            CROSSDOCK_UNROLL
            for (uint32_t v = 0; v < kVectors; ++v) {
                const uint32_t at = place(ctx, v);
                words[row][v] = at < bytes ? *reinterpret_cast<const Bytes16*>(parts[row] + at) : Bytes16{};
            }
        }
        CROSSDOCK_UNROLL
        for (uint32_t row = 0; row < kRows; ++row) {
            CROSSDOCK_UNROLL
            for (uint32_t v = 0; v < kVectors; ++v) add_weighted<kDType>(words[row][v], 1.0f, sums_[v]);
        }
    }
    CROSSDOCK_DEVICE void store(const Ctx& ctx, std::byte* part, uint32_t bytes) const {
        CROSSDOCK_UNROLL
        for (uint32_t v = 0; v < kVectors; ++v) {
            const uint32_t at = place(ctx, v);
            if (at < bytes) *reinterpret_cast<Bytes16*>(part + at) = packed(v);
        }
    }

    // What a lane holds: vectors of 16 bytes, and where in the part each lies.
    static constexpr uint32_t kVectors = kMostBytes / (16 * kLanes);
    static_assert(kVectors * 16 * kLanes == kMostBytes, "the lanes' vectors make up a part");
    CROSSDOCK_DEVICE Bytes16 packed(uint32_t v) const { return packed_sums<kDType>(sums_[v]); }
    CROSSDOCK_DEVICE static uint32_t place(const Ctx& ctx, uint32_t v) { return (v * kLanes + ctx.lane()) * 16; }

  private:
    float sums_[kVectors][16 / dtype_bytes(kDType)] = {};
};

#if defined(__CUDACC__)
// At most kRows rows. All loads are issued before the first part is added.
template <DType kDType, uint32_t kRows, uint32_t kVectors, typename Summands>
CROSSDOCK_DEVICE void sum_few_rows(const Ctx& ctx, const Summands& summands, uint32_t begin, uint32_t end,
                                   std::byte* out) {
    constexpr uint32_t kStep = kLanes * 16;
    CROSSDOCK_ROLLED
    for (uint32_t at = begin + ctx.lane() * 16; at < end; at += kVectors * kStep) {
        Bytes16 parts[kRows][kVectors] = {};
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kRows; ++i) {
            const std::byte* row = i < summands.count ? summands.row(i) : nullptr;
            CROSSDOCK_UNROLL
            for (uint32_t v = 0; v < kVectors; ++v) {
                if (row != nullptr && at + v * kStep < end)
                    parts[i][v] = *reinterpret_cast<const Bytes16*>(row + at + v * kStep);
            }
        }
        CROSSDOCK_UNROLL
        for (uint32_t v = 0; v < kVectors; ++v) {
            float sums[16 / dtype_bytes(kDType)] = {};
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kRows; ++i) {
                if (i < summands.count && summands.row(i) != nullptr)
                    add_weighted<kDType>(parts[i][v], summands.weight(i), sums);
            }
            if (at + v * kStep < end) *reinterpret_cast<Bytes16*>(out + at + v * kStep) = packed_sums<kDType>(sums);
        }
    }
}

template <DType kDType, typename Summands>
CROSSDOCK_DEVICE void sum_many_rows(const Ctx& ctx, const Summands& summands, uint32_t begin, uint32_t end,
                                    std::byte* out) {
    constexpr uint32_t kRowsAtOnce = 4;  // loaded together
    constexpr uint32_t kVectorsAtOnce = 2;
    constexpr uint32_t kStep = kLanes * 16;
    CROSSDOCK_ROLLED
    for (uint32_t at = begin + ctx.lane() * 16; at < end; at += kVectorsAtOnce * kStep) {
        float sums[kVectorsAtOnce][16 / dtype_bytes(kDType)] = {};
        CROSSDOCK_ROLLED
        for (uint32_t base = 0; base < summands.count; base += kRowsAtOnce) {
            Bytes16 parts[kRowsAtOnce][kVectorsAtOnce];
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kRowsAtOnce; ++i) {
                const std::byte* row = base + i < summands.count ? summands.row(base + i) : nullptr;
                if (row == nullptr) continue;
                CROSSDOCK_UNROLL
                for (uint32_t v = 0; v < kVectorsAtOnce; ++v) {
                    if (at + v * kStep < end) parts[i][v] = *reinterpret_cast<const Bytes16*>(row + at + v * kStep);
                }
            }
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kRowsAtOnce; ++i) {
                if (base + i >= summands.count || summands.row(base + i) == nullptr) continue;
                const float weight = summands.weight(base + i);
                CROSSDOCK_UNROLL
                for (uint32_t v = 0; v < kVectorsAtOnce; ++v) add_weighted<kDType>(parts[i][v], weight, sums[v]);
            }
        }
        CROSSDOCK_UNROLL
        for (uint32_t v = 0; v < kVectorsAtOnce; ++v) {
            if (at + v * kStep < end) *reinterpret_cast<Bytes16*>(out + at + v * kStep) = packed_sums<kDType>(sums[v]);
        }
    }
}
// Exactly kRows rows, kVectors vectors per lane at a time. All loads are issued before the first vector is added.
// Returns the first byte that is left: fewer than one such step remain.
template <DType kDType, uint32_t kRows, uint32_t kVectors>
CROSSDOCK_DEVICE uint32_t sum_whole_parts(const Ctx& ctx, const PointerSummands& summands, uint32_t begin, uint32_t end,
                                          std::byte* out) {
    constexpr uint32_t kStep = kLanes * 16;
    const uint32_t own = ctx.lane() * 16;
    const std::byte* rows[kRows];
    CROSSDOCK_UNROLL
    for (uint32_t i = 0; i < kRows; ++i) rows[i] = summands.row(i) + own;
    CROSSDOCK_ROLLED
    for (; begin + kVectors * kStep <= end; begin += kVectors * kStep) {
        Bytes16 parts[kVectors][kRows];
        CROSSDOCK_UNROLL
        for (uint32_t v = 0; v < kVectors; ++v) {
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kRows; ++i)
                parts[v][i] = *reinterpret_cast<const Bytes16*>(rows[i] + begin + v * kStep);
        }
        CROSSDOCK_UNROLL
        for (uint32_t v = 0; v < kVectors; ++v) {
            float sums[16 / dtype_bytes(kDType)] = {};
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kRows; ++i) add_weighted<kDType>(parts[v][i], 1.0f, sums);
            *reinterpret_cast<Bytes16*>(out + own + begin + v * kStep) = packed_sums<kDType>(sums);
        }
    }
    return begin;
}

template <DType kDType, typename Summands>
CROSSDOCK_DEVICE void sum_bytes(const Ctx& ctx, const Summands& summands, uint32_t begin, uint32_t end,
                                std::byte* out) {
    if constexpr (std::is_same_v<Summands, PointerSummands>) {
        if (summands.count == 1) begin = sum_whole_parts<kDType, 1, 7>(ctx, summands, begin, end, out);
        if (summands.count == 2) begin = sum_whole_parts<kDType, 2, 7>(ctx, summands, begin, end, out);
        if (summands.count == 3) begin = sum_whole_parts<kDType, 3, 4>(ctx, summands, begin, end, out);
        if (summands.count == 4) begin = sum_whole_parts<kDType, 4, 3>(ctx, summands, begin, end, out);
    } else if (summands.count <= 2) {
        return sum_few_rows<kDType, 2, 4>(ctx, summands, begin, end, out);
    }
    if (summands.count <= 4) {
        sum_few_rows<kDType, 4, 2>(ctx, summands, begin, end, out);
    } else {
        sum_many_rows<kDType>(ctx, summands, begin, end, out);
    }
}
#endif

// One warp. Elements [first, first + num); out is the row's beginning. num and first are multiples of the elements in
// 16 bytes.
template <DType kDType, typename Summands>
CROSSDOCK_DEVICE void sum_rows(const Ctx& ctx, const Summands& summands, uint32_t first, uint32_t num, std::byte* out) {
#if defined(__CUDACC__)
    const uint32_t begin = first * dtype_bytes(kDType);
    const uint32_t end = begin + num * dtype_bytes(kDType);
    sum_bytes<kDType>(ctx, summands, begin, end, out);
#else
    static_cast<void>(ctx);
    constexpr uint32_t kMostRows = 66;  // of the largest top-k, and two tensors that are added to them
    const std::byte* rows[kMostRows];
    float weights[kMostRows];
    uint32_t count = 0;
    for (uint32_t i = 0; i < summands.count; ++i) {
        if (summands.row(i) == nullptr) continue;
        rows[count] = summands.row(i);
        weights[count++] = summands.weight(i);
    }
    cpu::sum_rows(kDType, rows, weights, count, first, num, out);
#endif
}

}  // namespace
}  // namespace crossdock
