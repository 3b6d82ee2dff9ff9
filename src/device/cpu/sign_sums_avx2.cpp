// SPDX-License-Identifier: Apache-2.0
// Sums by sign with AVX2 and F16C. Only functions of this file use those instructions, so it is compiled like others.
#include "device/sign_sums.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define CROSSDOCK_SIGN_TARGET __attribute__((target("avx2,f16c")))
#include "device/cpu/sign_vectors.h"

namespace crossdock::cpu {
namespace {

struct HardwareF16 {
    static constexpr DType kDType = DType::kF16;
    static constexpr bool kIsInterleaved = false;
    using Value = Vector<float, 8>;

    CROSSDOCK_INLINE static void load_one(const std::byte* source, Value& value) {
        __m128i words;
        __builtin_memcpy(&words, source, sizeof(words));
        value = _mm256_cvtph_ps(words);
    }
    CROSSDOCK_INLINE static void load(const std::byte* source, Value& first, Value& second) {
        load_one(source, first);
        load_one(source + 16, second);
    }
    CROSSDOCK_INLINE static void store_one(std::byte* target, const Value& value) {
        const Value nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFE000));  // rounds to CUDA's spelling
        const Value spelled = value == value ? value : nan;
        const __m128i words = _mm256_cvtps_ph(spelled, _MM_FROUND_TO_NEAREST_INT);
        __builtin_memcpy(target, &words, sizeof(words));
    }
    CROSSDOCK_INLINE static void store(std::byte* target, const Value& first, const Value& second) {
        store_one(target, first);
        store_one(target + 16, second);
    }
};

struct Avx2 {
    static constexpr uint32_t kNum = 8;
    using F16Format = HardwareF16;
    using Doubles = Vector<double, 4>;

    CROSSDOCK_INLINE static void widen(const Vector<float, 8>& value, Doubles& low, Doubles& high) {
        low = _mm256_cvtps_pd(_mm256_castps256_ps128(value));
        high = _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1));
    }
    // Where one operand is a NaN, minpd and maxpd give the second one.
    CROSSDOCK_INLINE static void split(const Doubles& value, Doubles& up, Doubles& down) {
        const Doubles zero = {};
        up = _mm256_max_pd(value, zero);
        down = _mm256_min_pd(zero, value);
    }
};

template <typename Sum>
CROSSDOCK_SIGN_TARGET void sums(DType dtype, const std::byte* entries, uint32_t count, SignSums& result) {
    sums_any<Sum, Avx2>(dtype, entries, count, result);
}
CROSSDOCK_SIGN_TARGET void shift(DType dtype, std::byte* entries, uint32_t count, float up, float down) {
    shift_any<Avx2>(dtype, entries, count, up, down);
}

}  // namespace

const SignVariant kAvx2Signs{"avx2", sums<float>, sums<double>, shift};

}  // namespace crossdock::cpu
#endif
