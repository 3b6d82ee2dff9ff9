// SPDX-License-Identifier: Apache-2.0
// A2SGD's two passes over a chunk of the gradient: sums of its entries by sign, and a shift of its entries by sign. One
// warp per chunk.
//
// The order of a sum is part of its definition, so its bits are the same on every machine: entry i of a chunk is added
// to column i % 256, in ascending i, and columns are halved: c and c + 128, then c and c + 64, ...
#pragma once

#include "device/context.h"
#include "device/numeric.h"
#if !defined(__CUDACC__)
#include "a2sgd/device/cpu/sign_sums.h"
#endif

namespace crossdock {

inline constexpr uint32_t kSignColumns = 256;
inline constexpr uint32_t kSignChunk = 4096;  // entries at most

// Sums of the entries that are not negative (-0 is not), and of the magnitudes of the others (NaN is one of them).
struct SignSums {
    double positive;
    double negative;
    uint32_t num_positive;

    // Also false if finite entries add up to more than the sum's type holds.
    CROSSDOCK_HOST_DEVICE bool is_finite() const { return positive - positive == 0 && negative - negative == 0; }
};

namespace {

#if defined(__CUDACC__)

inline constexpr uint32_t kSignSlots = kSignColumns / kLanes;  // columns of a lane
inline constexpr uint32_t kSignLoadsAtOnce = 8;                // of 16 bytes per lane, under way
static_assert(kSignSlots * kLanes == kSignColumns && kSignChunk % (kSignColumns * kSignLoadsAtOnce) == 0);

// The column of a lane's slot: a lane loads 16 bytes at a time.
template <DType kDType>
CROSSDOCK_DEVICE uint32_t sign_column(int lane, uint32_t slot) {
    constexpr uint32_t kPerLoad = 16 / dtype_bytes(kDType);
    return slot / kPerLoad * kPerLoad * kLanes + static_cast<uint32_t>(lane) * kPerLoad + slot % kPerLoad;
}

template <DType kDType>
struct SignRow {
    static constexpr uint32_t kPerLoad = 16 / dtype_bytes(kDType);
    static constexpr uint32_t kLoads = kSignSlots / kPerLoad;
    static constexpr uint32_t kRowsAtOnce = kSignLoadsAtOnce / kLoads;
    static_assert(kLoads * kPerLoad == kSignSlots && kRowsAtOnce * kLoads == kSignLoadsAtOnce,
                  "a lane's columns are whole loads, and the loads under way whole rows");
    Bytes16 words[kLoads];

    CROSSDOCK_DEVICE static uint64_t offset(int lane, uint32_t load) {
        return uint64_t{16} * (load * kLanes + static_cast<uint32_t>(lane));
    }
    CROSSDOCK_DEVICE void load(const std::byte* row, int lane) {
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kLoads; ++i) words[i] = *reinterpret_cast<const Bytes16*>(row + offset(lane, i));
    }
    CROSSDOCK_DEVICE void store(std::byte* row, int lane) const {
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kLoads; ++i) *reinterpret_cast<Bytes16*>(row + offset(lane, i)) = words[i];
    }
    CROSSDOCK_DEVICE float at(uint32_t slot) const {
        constexpr uint32_t kHalf = kPerLoad / 2;
        const Bytes16& word = words[slot / kPerLoad];
        const uint32_t i = slot % kPerLoad;
        return element_of<kDType>(i < kHalf ? word.low : word.high, i % kHalf);
    }
    CROSSDOCK_DEVICE void shift(float up, float down) {
        constexpr uint32_t kHalf = kPerLoad / 2;
        Bytes16 moved[kLoads] = {};
        CROSSDOCK_UNROLL
        for (uint32_t slot = 0; slot < kSignSlots; ++slot) {
            const float value = at(slot);
            const uint64_t packed = packed_element<kDType>(value + (value >= 0 ? up : down), slot % kHalf);
            Bytes16& word = moved[slot / kPerLoad];
            (slot % kPerLoad < kHalf ? word.low : word.high) |= packed;
        }
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kLoads; ++i) words[i] = moved[i];
    }
};

// Columns as a lane holds them, and how they are halved.
template <typename Sum>
struct SignColumns {
    Sum positive[kSignSlots] = {};
    Sum negative[kSignSlots] = {};
    uint32_t num_positive = 0;

    CROSSDOCK_DEVICE void add(uint32_t slot, float value) {
        if (value >= 0) {
            positive[slot] += value;
            ++num_positive;
        } else {
            negative[slot] -= value;
        }
    }
    template <DType kDType>
    CROSSDOCK_DEVICE static double halve(const Ctx& ctx, Sum (&columns)[kSignSlots]) {
        constexpr uint32_t kPerLoad = 16 / dtype_bytes(kDType);  // neighbouring columns of a lane
        CROSSDOCK_UNROLL
        for (uint32_t slots = kSignSlots; slots > kPerLoad; slots /= 2) {
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < slots / 2; ++i) columns[i] += columns[i + slots / 2];
        }
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kPerLoad; ++i) columns[i] = ctx.warp_halving_sum(columns[i]);
        CROSSDOCK_UNROLL
        for (uint32_t slots = kPerLoad; slots > 1; slots /= 2) {
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < slots / 2; ++i) columns[i] += columns[i + slots / 2];
        }
        return columns[0];
    }
};

CROSSDOCK_DEVICE bool is_loadable_by_16(const void* entries) { return reinterpret_cast<uintptr_t>(entries) % 16 == 0; }

template <DType kDType, typename Sum>
CROSSDOCK_DEVICE SignSums sign_sums_of(const Ctx& ctx, const std::byte* entries, uint32_t count) {
    constexpr uint32_t kRowBytes = kSignColumns * dtype_bytes(kDType);
    SignColumns<Sum> columns;
    uint32_t done = 0;
    if (is_loadable_by_16(entries)) {
        constexpr uint32_t kRows = SignRow<kDType>::kRowsAtOnce;
        SignRow<kDType> rows[kRows];
        CROSSDOCK_ROLLED
        for (; done + kSignColumns * kRows <= count; done += kSignColumns * kRows) {
            const std::byte* first = entries + uint64_t{done} * dtype_bytes(kDType);
            CROSSDOCK_UNROLL
            for (uint32_t row = 0; row < kRows; ++row) rows[row].load(first + row * kRowBytes, ctx.lane());
            CROSSDOCK_UNROLL
            for (uint32_t row = 0; row < kRows; ++row) {
                CROSSDOCK_UNROLL
                for (uint32_t slot = 0; slot < kSignSlots; ++slot) columns.add(slot, rows[row].at(slot));
            }
        }
    }
    CROSSDOCK_ROLLED
    for (; done < count; done += kSignColumns) {
        CROSSDOCK_UNROLL
        for (uint32_t slot = 0; slot < kSignSlots; ++slot) {
            const uint32_t i = done + sign_column<kDType>(ctx.lane(), slot);
            if (i < count) columns.add(slot, load_element<kDType>(entries, i));
        }
    }
    SignSums sums;
    sums.positive = SignColumns<Sum>::template halve<kDType>(ctx, columns.positive);
    sums.negative = SignColumns<Sum>::template halve<kDType>(ctx, columns.negative);
    sums.num_positive = ctx.warp_sum(columns.num_positive);
    return sums;
}

template <DType kDType>
CROSSDOCK_DEVICE void shift_by_sign_of(const Ctx& ctx, std::byte* entries, uint32_t count, float up, float down) {
    constexpr uint32_t kRowBytes = kSignColumns * dtype_bytes(kDType);
    uint32_t done = 0;
    if (is_loadable_by_16(entries)) {
        constexpr uint32_t kRows = SignRow<kDType>::kRowsAtOnce;
        SignRow<kDType> rows[kRows];
        CROSSDOCK_ROLLED
        for (; done + kSignColumns * kRows <= count; done += kSignColumns * kRows) {
            std::byte* first = entries + uint64_t{done} * dtype_bytes(kDType);
            CROSSDOCK_UNROLL
            for (uint32_t row = 0; row < kRows; ++row) rows[row].load(first + row * kRowBytes, ctx.lane());
            CROSSDOCK_UNROLL
            for (uint32_t row = 0; row < kRows; ++row) {
                rows[row].shift(up, down);
                rows[row].store(first + row * kRowBytes, ctx.lane());
            }
        }
    }
    CROSSDOCK_ROLLED
    for (uint32_t i = done + ctx.lane(); i < count; i += kLanes) {
        const float value = load_element<kDType>(entries, i);
        store_element<kDType>(entries, i, value + (value >= 0 ? up : down));
    }
}

template <typename Sum>
CROSSDOCK_DEVICE SignSums sign_sums(const Ctx& ctx, DType dtype, const std::byte* entries, uint32_t count) {
    switch (dtype) {
        case DType::kBf16:
            return sign_sums_of<DType::kBf16, Sum>(ctx, entries, count);
        case DType::kF16:
            return sign_sums_of<DType::kF16, Sum>(ctx, entries, count);
        case DType::kF32:
            return sign_sums_of<DType::kF32, Sum>(ctx, entries, count);
    }
    return {};
}

// Adds `up` to entries that are not negative, `down` to the others, rounding once.
CROSSDOCK_DEVICE void shift_by_sign(const Ctx& ctx, DType dtype, std::byte* entries, uint32_t count, float up,
                                    float down) {
    switch (dtype) {
        case DType::kBf16:
            return shift_by_sign_of<DType::kBf16>(ctx, entries, count, up, down);
        case DType::kF16:
            return shift_by_sign_of<DType::kF16>(ctx, entries, count, up, down);
        case DType::kF32:
            return shift_by_sign_of<DType::kF32>(ctx, entries, count, up, down);
    }
}

#else

template <typename Sum>
CROSSDOCK_DEVICE SignSums sign_sums(const Ctx&, DType dtype, const std::byte* entries, uint32_t count) {
    SignSums sums{};
    cpu::sign_sums<Sum>(dtype, entries, count, sums);
    return sums;
}

CROSSDOCK_DEVICE void shift_by_sign(const Ctx&, DType dtype, std::byte* entries, uint32_t count, float up, float down) {
    cpu::shift_by_sign(dtype, entries, count, up, down);
}

#endif

}  // namespace
}  // namespace crossdock
