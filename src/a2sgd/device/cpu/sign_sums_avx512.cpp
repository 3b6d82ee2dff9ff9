// SPDX-License-Identifier: Apache-2.0
// Sums by sign with AVX-512. Only functions of this file use those instructions, so it is compiled like others.
#include "a2sgd/device/sign_sums.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define CROSSDOCK_SIGN_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#include "a2sgd/device/cpu/sign_vectors.h"

namespace crossdock::cpu {
namespace {

struct Avx512 {
    static constexpr uint32_t kNum = 16;
    using F16Format = HardwareF16<Avx512, kNum>;
    using Doubles = Vector<double, 8>;

    CROSSDOCK_INLINE static void load_f16(const std::byte* source, Vector<float, 16>& value) {
        __m256i words;
        __builtin_memcpy(&words, source, sizeof(words));
        value = _mm512_cvtph_ps(words);
    }
    CROSSDOCK_INLINE static void store_f16(std::byte* target, const Vector<float, 16>& value) {
        const __m256i words = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
        __builtin_memcpy(target, &words, sizeof(words));
    }
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

}  // namespace

const SignVariant kAvx512Signs = variant_of<Avx512>("avx512");

}  // namespace crossdock::cpu
#endif
