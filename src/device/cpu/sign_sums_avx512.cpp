// SPDX-License-Identifier: Apache-2.0
// Sums by sign with AVX-512. Only functions of this file use those instructions, so it is compiled like others.
#include "device/sign_sums.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define CROSSDOCK_SIGN_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#include "device/cpu/sign_vectors.h"

namespace crossdock::cpu {
namespace {

struct HardwareF16 {
    static constexpr DType kDType = DType::kF16;
    static constexpr bool kIsInterleaved = false;
    using Value = Vector<float, 16>;

    CROSSDOCK_INLINE static void load_one(const std::byte* source, Value& value) {
        __m256i words;
        __builtin_memcpy(&words, source, sizeof(words));
        value = _mm512_cvtph_ps(words);
    }
    CROSSDOCK_INLINE static void load(const std::byte* source, Value& first, Value& second) {
        load_one(source, first);
        load_one(source + 32, second);
    }
    CROSSDOCK_INLINE static void store_one(std::byte* target, const Value& value) {
        const Value nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FFFE000));  // rounds to CUDA's spelling
        const Value spelled = value == value ? value : nan;
        const __m256i words = _mm512_cvtps_ph(spelled, _MM_FROUND_TO_NEAREST_INT);
        __builtin_memcpy(target, &words, sizeof(words));
    }
    CROSSDOCK_INLINE static void store(std::byte* target, const Value& first, const Value& second) {
        store_one(target, first);
        store_one(target + 32, second);
    }
};

struct Avx512 {
    static constexpr uint32_t kNum = 16;
    using F16Format = HardwareF16;
    using Doubles = Vector<double, 8>;

    CROSSDOCK_INLINE static void widen(const Vector<float, 16>& value, Doubles& low, Doubles& high) {
        low = _mm512_cvtps_pd(_mm512_castps512_ps256(value));
        high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1));
    }
    // Where one operand is a NaN, minpd and maxpd give the second one.
    CROSSDOCK_INLINE static void split(const Doubles& value, Doubles& up, Doubles& down) {
        const Doubles zero = {};
        up = _mm512_max_pd(value, zero);
        down = _mm512_min_pd(zero, value);
    }
};

template <typename Sum>
CROSSDOCK_SIGN_TARGET void sums(DType dtype, const std::byte* entries, uint32_t count, SignSums& result) {
    sums_any<Sum, Avx512>(dtype, entries, count, result);
}
CROSSDOCK_SIGN_TARGET void shift(DType dtype, std::byte* entries, uint32_t count, float up, float down) {
    shift_any<Avx512>(dtype, entries, count, up, down);
}

}  // namespace

const SignVariant kAvx512Signs{"avx512", sums<float>, sums<double>, shift};

}  // namespace crossdock::cpu
#endif
