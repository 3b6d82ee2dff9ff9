// SPDX-License-Identifier: Apache-2.0
// One body, compiled for several vector widths: auto-vectorised, chosen once at run time. (The compiler's own
// target_clones needs a resolver that runs before the sanitizers are ready.)
#include "device/cpu/sum_rows.h"

#include <cstring>

namespace crossdock::cpu {
namespace {

constexpr uint32_t kBlock = 512;  // elements whose fp32 sums stay in the first-level cache

template <DType kDType>
__attribute__((always_inline)) inline void sum_rows_of(const std::byte* const* rows, const float* weights,
                                                       uint32_t count, uint32_t first, uint32_t num, std::byte* out) {
    alignas(64) float sums[kBlock];
    for (uint32_t at = first; at < first + num; at += kBlock) {
        const uint32_t block = first + num - at < kBlock ? first + num - at : kBlock;
        std::memset(sums, 0, sizeof(float) * block);
        for (uint32_t i = 0; i < count; ++i) {
            const float weight = weights[i];
            const std::byte* row = rows[i] + uint64_t{at} * dtype_bytes(kDType);
            for (uint32_t e = 0; e < block; ++e)
                sums[e] = __builtin_fmaf(weight, load_element<kDType>(row, e), sums[e]);
            // g++ 12 would merge the loops of two rows into one that it cannot vectorise any more.
            asm volatile("" : : "r"(sums) : "memory");
        }
        std::byte* target = out + uint64_t{at} * dtype_bytes(kDType);
        for (uint32_t e = 0; e < block; ++e) store_element<kDType>(target, e, sums[e]);
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

SumRows choose() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? sum_rows_avx2 : sum_rows_plain;
}
#else
SumRows choose() { return sum_rows_plain; }
#endif

}  // namespace

void sum_rows(DType dtype, const std::byte* const* rows, const float* weights, uint32_t count, uint32_t first,
              uint32_t num, std::byte* out) {
    static const SumRows chosen = choose();
    chosen(dtype, rows, weights, count, first, num, out);
}

}  // namespace crossdock::cpu
