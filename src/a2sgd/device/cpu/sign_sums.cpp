// SPDX-License-Identifier: Apache-2.0
#include "a2sgd/device/sign_sums.h"

#include <type_traits>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "core/process.h"

#define CROSSDOCK_SIGN_TARGET  // what every processor of the architecture has
#include "a2sgd/device/cpu/sign_vectors.h"

namespace crossdock::cpu {
namespace {

struct Plain {
    static constexpr uint32_t kNum = 4;
    using F16Format = F16<kNum>;
    using Doubles = Vector<double, 2>;

    CROSSDOCK_INLINE static void widen(const Vector<float, 4>& value, Doubles& low, Doubles& high) {
        low = Doubles{value[0], value[1]};
        high = Doubles{value[2], value[3]};
    }
    CROSSDOCK_INLINE static void split(const Doubles& value, Doubles& up, Doubles& down) {
        const Doubles zero = {};
        up = value >= zero ? value : zero;
        down = value >= zero ? zero : value;
    }
};

#if defined(__x86_64__)
bool has_f16c() {
    unsigned int a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

const SignVariant& chosen() {
    static const SignVariant& variant = *sign_variants().front();
    return variant;
}
const MadeAtLoad sign_sums_made_at_load(chosen);

}  // namespace

const SignVariant kPlainSigns = variant_of<Plain>("plain");

std::vector<const SignVariant*> sign_variants() {
    std::vector<const SignVariant*> variants;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        variants.push_back(&kAvx512Signs);
    if (__builtin_cpu_supports("avx2") && has_f16c()) variants.push_back(&kAvx2Signs);
#endif
    variants.push_back(&kPlainSigns);
    return variants;
}

template <typename Sum>
void sign_sums(DType dtype, const std::byte* entries, uint32_t count, SignSums& result) {
    const SignVariant& variant = chosen();
    (std::is_same_v<Sum, float> ? variant.sums_in_fp32 : variant.sums_in_fp64)(dtype, entries, count, result);
}
template void sign_sums<float>(DType, const std::byte*, uint32_t, SignSums&);
template void sign_sums<double>(DType, const std::byte*, uint32_t, SignSums&);

void shift_by_sign(DType dtype, std::byte* entries, uint32_t count, float up, float down) {
    chosen().shift(dtype, entries, count, up, down);
}

}  // namespace crossdock::cpu
