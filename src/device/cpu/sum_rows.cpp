// SPDX-License-Identifier: Apache-2.0
// One body, compiled for several vector widths: auto-vectorised, chosen once at run time. (The compiler's own
// target_clones needs a resolver that runs before the sanitizers are ready.)
#include "device/cpu/sum_rows.h"

#include <cstring>
#include <type_traits>

#include "core/process.h"

namespace crossdock::cpu {
namespace {

constexpr uint32_t kBlock = 512;   // elements whose fp32 sums stay in the first-level cache
constexpr uint32_t kMostRows = 8;  // read side by side

// Adds kRows rows to sums, or where that is null sets out to their sum. Elements [first, first + num) of rows and out,
// from 0 on of sums. Rows are read side by side, since with one after the other loading and storing the sums takes
// longer than fetching the rows from memory.
template <DType kDType, uint32_t kRows, typename Sums>
__attribute__((always_inline)) inline void add_rows(const std::byte* const* rows, const float* weights, uint32_t first,
                                                    uint32_t num, Sums sums, std::byte* out) {
    constexpr bool kIsAll = std::is_null_pointer_v<Sums>;
    const uint64_t offset = uint64_t{first} * dtype_bytes(kDType);
    const std::byte* row[kRows];
    for (uint32_t i = 0; i < kRows; ++i) row[i] = rows[i] + offset;
#pragma GCC ivdep
    for (uint32_t e = 0; e < num; ++e) {
        float sum = 0;
        if constexpr (!kIsAll) sum = sums[e];
#pragma GCC unroll 8
        for (uint32_t i = 0; i < kRows; ++i) sum = __builtin_fmaf(weights[i], load_element<kDType>(row[i], e), sum);
        if constexpr (kIsAll) {
            store_element<kDType>(out + offset, e, sum);
        } else {
            sums[e] = sum;
        }
    }
}

template <DType kDType>
__attribute__((always_inline)) inline void sum_rows_of(const std::byte* const* rows, const float* weights,
                                                       uint32_t count, uint32_t first, uint32_t num, std::byte* out) {
    switch (count) {
#define CROSSDOCK_SUM(n) \
    case n:              \
        return add_rows<kDType, n>(rows, weights, first, num, nullptr, out);
        CROSSDOCK_SUM(1)
        CROSSDOCK_SUM(2)
        CROSSDOCK_SUM(3)
        CROSSDOCK_SUM(4)
        CROSSDOCK_SUM(5)
        CROSSDOCK_SUM(6)
        CROSSDOCK_SUM(7)
        CROSSDOCK_SUM(8)
#undef CROSSDOCK_SUM
        default:
            break;
    }
    alignas(64) float sums[kBlock];
    for (uint32_t at = first; at < first + num; at += kBlock) {
        const uint32_t block = first + num - at < kBlock ? first + num - at : kBlock;
        std::memset(sums, 0, sizeof(float) * block);
        uint32_t i = 0;
        for (; i + kMostRows <= count; i += kMostRows)
            add_rows<kDType, kMostRows>(rows + i, weights + i, at, block, &sums[0], out);
        for (; i < count; ++i) add_rows<kDType, 1>(rows + i, weights + i, at, block, &sums[0], out);
        for (uint32_t e = 0; e < block; ++e) store_element<kDType>(out, at + e, sums[e]);
    }
}

__attribute__((always_inline)) inline void sum_rows_any(DType dtype, const std::byte* const* rows, const float* weights,
                                                        uint32_t count, uint32_t first, uint32_t num, std::byte* out) {
    switch (dtype) {
        case DType::kBf16:
            return sum_rows_of<DType::kBf16>(rows, weights, count, first, num, out);
        case DType::kF16:
            return sum_rows_of<DType::kF16>(rows, weights, count, first, num, out);
        case DType::kF32:
            return sum_rows_of<DType::kF32>(rows, weights, count, first, num, out);
    }
}

using SumRows = void (*)(DType, const std::byte* const*, const float*, uint32_t, uint32_t, uint32_t, std::byte*);

void sum_rows_plain(DType dtype, const std::byte* const* rows, const float* weights, uint32_t count, uint32_t first,
                    uint32_t num, std::byte* out) {
    sum_rows_any(dtype, rows, weights, count, first, num, out);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void sum_rows_avx2(DType dtype, const std::byte* const* rows, const float* weights,
                                                       uint32_t count, uint32_t first, uint32_t num, std::byte* out) {
    sum_rows_any(dtype, rows, weights, count, first, num, out);
}

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512"))) void sum_rows_avx512(
    DType dtype, const std::byte* const* rows, const float* weights, uint32_t count, uint32_t first, uint32_t num,
    std::byte* out) {
    sum_rows_any(dtype, rows, weights, count, first, num, out);
}

SumRows choose() {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return sum_rows_avx512;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? sum_rows_avx2 : sum_rows_plain;
}
#else
SumRows choose() { return sum_rows_plain; }
#endif

SumRows chosen() {
    static const SumRows choice = choose();
    return choice;
}
const MadeAtLoad sum_rows_made_at_load(chosen);

}  // namespace

void sum_rows(DType dtype, const std::byte* const* rows, const float* weights, uint32_t count, uint32_t first,
              uint32_t num, std::byte* out) {
    chosen()(dtype, rows, weights, count, first, num, out);
}

}  // namespace crossdock::cpu
