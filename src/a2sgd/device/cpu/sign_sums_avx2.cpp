// SPDX-License-Identifier: Apache-2.0
// Sums by sign with AVX2 and F16C. Only functions of this file use those instructions, so it is compiled like others.
#include "a2sgd/device/sign_sums.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define CROSSDOCK_SIGN_TARGET __attribute__((target("avx2,f16c")))
#include "a2sgd/device/cpu/sign_vectors.h"

namespace crossdock::cpu {
namespace {

struct Avx2 {
    static constexpr uint32_t kNum = 8;
    using F16Format = HardwareF16<Avx2, kNum>;
    using Doubles = Vector<double, 4>;

    CROSSDOCK_INLINE static void load_f16(const std::byte* source, Vector<float, 8>& value) {
        __m128i words;
        __builtin_memcpy(&words, source, sizeof(words));
        value = _mm256_cvtph_ps(words);
    }
    CROSSDOCK_INLINE static void store_f16(std::byte* target, const Vector<float, 8>& value) {
        const __m128i words = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
        __builtin_memcpy(target, &words, sizeof(words));
    }
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

}  // namespace

const SignVariant kAvx2Signs = variant_of<Avx2>("avx2");

}  // namespace crossdock::cpu
#endif
