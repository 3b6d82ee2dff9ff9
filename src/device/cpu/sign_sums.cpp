// SPDX-License-Identifier: Apache-2.0
// One body, compiled for several vector widths: auto-vectorised, chosen once at run time (as device/cpu/sum_rows.cpp).
#include "device/sign_sums.h"

namespace crossdock::cpu {
namespace {

// Adds entries to the first columns; how many are not negative.
template <DType kDType, typename Sum>
__attribute__((always_inline)) inline uint32_t add_row(const std::byte* row, uint32_t count, Sum* positive,
                                                       Sum* negative) {
    uint32_t num_positive = 0;
#pragma GCC ivdep
    for (uint32_t i = 0; i < count; ++i) {
        const float value = load_element<kDType>(row, i);
        const bool is_positive = value >= 0;
        positive[i] += is_positive ? value : 0.0f;
        negative[i] -= is_positive ? 0.0f : value;
        num_positive += is_positive ? 1 : 0;
    }
    return num_positive;
}

template <typename Sum>
__attribute__((always_inline)) inline double halve(Sum* columns) {
    for (uint32_t stride = kSignColumns / 2; stride > 0; stride /= 2) {
#pragma GCC ivdep
        for (uint32_t i = 0; i < stride; ++i) columns[i] += columns[i + stride];
    }
    return columns[0];
}

template <DType kDType, typename Sum>
__attribute__((always_inline)) inline void sums_of(const std::byte* entries, uint32_t count, SignSums& sums) {
    alignas(64) Sum positive[kSignColumns] = {};
    alignas(64) Sum negative[kSignColumns] = {};
    sums.num_positive = 0;
    uint32_t done = 0;
    for (; done + kSignColumns <= count; done += kSignColumns) {
        sums.num_positive +=
            add_row<kDType>(entries + done * dtype_bytes(kDType), kSignColumns, &positive[0], &negative[0]);
    }
    sums.num_positive +=
        add_row<kDType>(entries + done * dtype_bytes(kDType), count - done, &positive[0], &negative[0]);
    sums.positive = halve(&positive[0]);
    sums.negative = halve(&negative[0]);
}

template <typename Sum>
__attribute__((always_inline)) inline void sums_any(DType dtype, const std::byte* entries, uint32_t count,
                                                    SignSums& sums) {
    switch (dtype) {
        case DType::kBf16:
            return sums_of<DType::kBf16, Sum>(entries, count, sums);
        case DType::kF16:
            return sums_of<DType::kF16, Sum>(entries, count, sums);
        case DType::kF32:
            return sums_of<DType::kF32, Sum>(entries, count, sums);
    }
}

template <DType kDType>
__attribute__((always_inline)) inline void shift_of(std::byte* entries, uint32_t count, float up, float down) {
#pragma GCC ivdep
    for (uint32_t i = 0; i < count; ++i) {
        const float value = load_element<kDType>(entries, i);
        store_element<kDType>(entries, i, value + (value >= 0 ? up : down));
    }
}

__attribute__((always_inline)) inline void shift_any(DType dtype, std::byte* entries, uint32_t count, float up,
                                                     float down) {
    switch (dtype) {
        case DType::kBf16:
            return shift_of<DType::kBf16>(entries, count, up, down);
        case DType::kF16:
            return shift_of<DType::kF16>(entries, count, up, down);
        case DType::kF32:
            return shift_of<DType::kF32>(entries, count, up, down);
    }
}

template <typename Sum>
using SumsBySign = void (*)(DType, const std::byte*, uint32_t, SignSums&);
using ShiftBySign = void (*)(DType, std::byte*, uint32_t, float, float);

template <typename Sum>
void sums_plain(DType dtype, const std::byte* entries, uint32_t count, SignSums& sums) {
    sums_any<Sum>(dtype, entries, count, sums);
}
void shift_plain(DType dtype, std::byte* entries, uint32_t count, float up, float down) {
    shift_any(dtype, entries, count, up, down);
}

#if defined(__x86_64__)
#define CROSSDOCK_AVX2 __attribute__((target("avx2")))
#define CROSSDOCK_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))

template <typename Sum>
CROSSDOCK_AVX2 void sums_avx2(DType dtype, const std::byte* entries, uint32_t count, SignSums& sums) {
    sums_any<Sum>(dtype, entries, count, sums);
}
CROSSDOCK_AVX2 void shift_avx2(DType dtype, std::byte* entries, uint32_t count, float up, float down) {
    shift_any(dtype, entries, count, up, down);
}
template <typename Sum>
CROSSDOCK_AVX512 void sums_avx512(DType dtype, const std::byte* entries, uint32_t count, SignSums& sums) {
    sums_any<Sum>(dtype, entries, count, sums);
}
CROSSDOCK_AVX512 void shift_avx512(DType dtype, std::byte* entries, uint32_t count, float up, float down) {
    shift_any(dtype, entries, count, up, down);
}

bool has_avx512() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}
bool has_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2");
}

template <typename Sum>
SumsBySign<Sum> choose_sums() {
    if (has_avx512()) return sums_avx512<Sum>;
    return has_avx2() ? sums_avx2<Sum> : sums_plain<Sum>;
}
ShiftBySign choose_shift() {
    if (has_avx512()) return shift_avx512;
    return has_avx2() ? shift_avx2 : shift_plain;
}
#else
template <typename Sum>
SumsBySign<Sum> choose_sums() {
    return sums_plain<Sum>;
}
ShiftBySign choose_shift() { return shift_plain; }
#endif

}  // namespace

template <typename Sum>
void sign_sums(DType dtype, const std::byte* entries, uint32_t count, SignSums& sums) {
    static const SumsBySign<Sum> chosen = choose_sums<Sum>();
    chosen(dtype, entries, count, sums);
}
template void sign_sums<float>(DType, const std::byte*, uint32_t, SignSums&);
template void sign_sums<double>(DType, const std::byte*, uint32_t, SignSums&);

void shift_by_sign(DType dtype, std::byte* entries, uint32_t count, float up, float down) {
    static const ShiftBySign chosen = choose_shift();
    chosen(dtype, entries, count, up, down);
}

}  // namespace crossdock::cpu
