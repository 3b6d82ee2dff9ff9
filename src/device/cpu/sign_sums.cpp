// SPDX-License-Identifier: Apache-2.0
// One body in the compiler's vector types, compiled for several widths, chosen once at run time. A block of columns
// stays in registers for all rows of a chunk: columns in memory would be read and written for every entry. The next
// chunk is fetched meanwhile, since a walk by blocks is not what processors foresee.
#include "device/sign_sums.h"

#include <type_traits>

namespace crossdock::cpu {
namespace {

#define CROSSDOCK_INLINE __attribute__((always_inline)) inline

template <typename Element, uint32_t kNum>
using Vector __attribute__((vector_size(sizeof(Element) * kNum))) = Element;

// Two vectors of kNum floats from 2 * kNum neighbouring entries of any dtype, as device/numeric.h converts them. Those
// of 16 bits lie in pairs in words of 32: one vector has the lower halves, the other the upper ones.
template <uint32_t kNum>
struct Floats {
    using Value = Vector<float, kNum>;
    using Bits = Vector<uint32_t, kNum>;

    // Of lane `lane` of vector v, among the entries.
    template <DType kDType>
    static constexpr uint32_t place(uint32_t v, uint32_t lane) {
        return kDType == DType::kF32 ? v * kNum + lane : 2 * lane + v;
    }

    CROSSDOCK_INLINE static void f16_values(const Bits& bits, Value& value) {
        const Bits magnitude = bits & 0x7FFFu;
        const Value scaled = reinterpret_cast<Value>(magnitude << 13) * 0x1p112f;
        const Bits special = 0x7F800000u | (magnitude & 0x3FFu) << 13;
        const Bits chosen = magnitude >= 0x7C00u ? special : reinterpret_cast<Bits>(scaled);
        value = reinterpret_cast<Value>(chosen | (bits & 0x8000u) << 16);
    }

    template <DType kDType>
    CROSSDOCK_INLINE static void load(const std::byte* source, Value (&values)[2]) {
        if constexpr (kDType == DType::kF32) {
            __builtin_memcpy(&values[0], source, sizeof(Value));
            __builtin_memcpy(&values[1], source + sizeof(Value), sizeof(Value));
            return;
        }
        Bits words;
        __builtin_memcpy(&words, source, sizeof(words));
        if constexpr (kDType == DType::kBf16) {
            values[0] = reinterpret_cast<Value>(words << 16);
            values[1] = reinterpret_cast<Value>(words & 0xFFFF0000u);
        } else {
            f16_values(words & 0xFFFFu, values[0]);
            f16_values(words >> 16, values[1]);
        }
    }

    // Rounded, in the lower half of each word.
    template <DType kDType>
    CROSSDOCK_INLINE static void round(const Value& value, Bits& result) {
        const Bits bits = reinterpret_cast<Bits>(value);
        const Bits magnitude = bits & 0x7FFFFFFFu;
        const Bits none = {};
        if constexpr (kDType == DType::kBf16) {
            result = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
        } else {
            const Bits subnormal = reinterpret_cast<Bits>(reinterpret_cast<Value>(magnitude) + 0.5f) - 0x3F000000u;
            const Bits normal = (magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
            const Bits finite = magnitude < 0x38800000u ? subnormal : normal;
            result = (magnitude >= 0x477FF000u ? none + 0x7C00u : finite) | (bits >> 16 & 0x8000u);
        }
        result = magnitude > 0x7F800000u ? none + 0x7FFFu : result;
    }

    template <DType kDType>
    CROSSDOCK_INLINE static void store(std::byte* target, const Value (&values)[2]) {
        if constexpr (kDType == DType::kF32) {
            __builtin_memcpy(target, &values[0], sizeof(Value));
            __builtin_memcpy(target + sizeof(Value), &values[1], sizeof(Value));
        } else {
            Bits low, high;
            round<kDType>(values[0], low);
            round<kDType>(values[1], high);
            const Bits words = low | high << 16;
            __builtin_memcpy(target, &words, sizeof(words));
        }
    }
};

// Columns [first, first + 2 * kPairs * kNum) of so many whole rows; how many entries are not negative.
template <DType kDType, typename Sum, uint32_t kNum, uint32_t kPairs>
CROSSDOCK_INLINE uint32_t add_block(const std::byte* entries, uint32_t rows, uint32_t first, Sum* positive,
                                    Sum* negative) {
    using Value = typename Floats<kNum>::Value;
    using Bits = typename Floats<kNum>::Bits;
    using Sums = Vector<Sum, kNum>;
    constexpr uint32_t kBytes = dtype_bytes(kDType);
    Sums up[2 * kPairs] = {}, down[2 * kPairs] = {};
    Bits counts = {};
    for (uint32_t row = 0; row < rows; ++row) {
        const std::byte* block = entries + (row * kSignColumns + first) * kBytes;
#pragma GCC unroll 8
        for (uint32_t pair = 0; pair < kPairs; ++pair) {
            Value values[2];
            Floats<kNum>::template load<kDType>(block + pair * 2 * kNum * kBytes, values);
#pragma GCC unroll 2
            for (uint32_t v = 0; v < 2; ++v) {
                const Bits mask = reinterpret_cast<Bits>(values[v] >= 0.0f);
                const Value is_up = reinterpret_cast<Value>(reinterpret_cast<Bits>(values[v]) & mask);
                const Value is_down = reinterpret_cast<Value>(reinterpret_cast<Bits>(values[v]) & ~mask);
                counts -= mask;
                if constexpr (std::is_same_v<Sum, float>) {
                    up[2 * pair + v] += is_up;
                    down[2 * pair + v] -= is_down;
                } else {
                    up[2 * pair + v] += __builtin_convertvector(is_up, Sums);
                    down[2 * pair + v] -= __builtin_convertvector(is_down, Sums);
                }
            }
        }
    }
    for (uint32_t i = 0; i < 2 * kPairs; ++i) {
        for (uint32_t lane = 0; lane < kNum; ++lane) {
            const uint32_t column = first + i / 2 * 2 * kNum + Floats<kNum>::template place<kDType>(i % 2, lane);
            positive[column] = up[i][lane];
            negative[column] = down[i][lane];
        }
    }
    uint32_t num_positive = 0;
    for (uint32_t lane = 0; lane < kNum; ++lane) num_positive += counts[lane];
    return num_positive;
}

CROSSDOCK_INLINE void fetch(const std::byte* first, uint32_t bytes) {
    for (uint32_t i = 0; i < bytes; i += 64) __builtin_prefetch(first + i);
}

template <typename Sum>
CROSSDOCK_INLINE double halve(Sum* columns) {
    for (uint32_t stride = kSignColumns / 2; stride > 0; stride /= 2) {
#pragma GCC ivdep
        for (uint32_t i = 0; i < stride; ++i) columns[i] += columns[i + stride];
    }
    return columns[0];
}

template <DType kDType, typename Sum, uint32_t kNum>
CROSSDOCK_INLINE void sums_of(const std::byte* entries, uint32_t count, SignSums& sums) {
    constexpr uint32_t kPairs = 2;
    constexpr uint32_t kBlock = kPairs * 2 * kNum;
    constexpr uint32_t kBytes = dtype_bytes(kDType);
    alignas(64) Sum positive[kSignColumns];
    alignas(64) Sum negative[kSignColumns];
    const uint32_t rows = count / kSignColumns;
    sums.num_positive = 0;
    for (uint32_t first = 0; first < kSignColumns; first += kBlock) {
        fetch(entries + (kSignChunk + first * kSignChunk / kSignColumns) * kBytes,
              kBlock * kSignChunk / kSignColumns * kBytes);
        sums.num_positive += add_block<kDType, Sum, kNum, kPairs>(entries, rows, first, &positive[0], &negative[0]);
    }
    for (uint32_t i = rows * kSignColumns; i < count; ++i) {
        const float value = load_element<kDType>(entries, i);
        const uint32_t mask = value >= 0 ? ~0u : 0u;
        positive[i % kSignColumns] += float_of(bits_of(value) & mask);
        negative[i % kSignColumns] -= float_of(bits_of(value) & ~mask);
        sums.num_positive += mask & 1;
    }
    sums.positive = halve(&positive[0]);
    sums.negative = halve(&negative[0]);
}

template <typename Sum, uint32_t kNum>
CROSSDOCK_INLINE void sums_any(DType dtype, const std::byte* entries, uint32_t count, SignSums& sums) {
    switch (dtype) {
        case DType::kBf16:
            return sums_of<DType::kBf16, Sum, kNum>(entries, count, sums);
        case DType::kF16:
            return sums_of<DType::kF16, Sum, kNum>(entries, count, sums);
        case DType::kF32:
            return sums_of<DType::kF32, Sum, kNum>(entries, count, sums);
    }
}

template <DType kDType, uint32_t kNum>
CROSSDOCK_INLINE void shift_of(std::byte* entries, uint32_t count, float up, float down) {
    using Value = typename Floats<kNum>::Value;
    const Value zero = {};
    uint32_t i = 0;
    for (; i + 2 * kNum <= count; i += 2 * kNum) {
        std::byte* place = entries + i * dtype_bytes(kDType);
        Value values[2];
        Floats<kNum>::template load<kDType>(place, values);
        for (Value& value : values) value += value >= zero ? zero + up : zero + down;
        Floats<kNum>::template store<kDType>(place, values);
    }
    for (; i < count; ++i) {
        const float value = load_element<kDType>(entries, i);
        store_element<kDType>(entries, i, value + (value >= 0 ? up : down));
    }
}

template <uint32_t kNum>
CROSSDOCK_INLINE void shift_any(DType dtype, std::byte* entries, uint32_t count, float up, float down) {
    switch (dtype) {
        case DType::kBf16:
            return shift_of<DType::kBf16, kNum>(entries, count, up, down);
        case DType::kF16:
            return shift_of<DType::kF16, kNum>(entries, count, up, down);
        case DType::kF32:
            return shift_of<DType::kF32, kNum>(entries, count, up, down);
    }
}

template <typename Sum>
using SumsBySign = void (*)(DType, const std::byte*, uint32_t, SignSums&);
using ShiftBySign = void (*)(DType, std::byte*, uint32_t, float, float);

template <typename Sum>
void sums_plain(DType dtype, const std::byte* entries, uint32_t count, SignSums& sums) {
    sums_any<Sum, 4>(dtype, entries, count, sums);
}
void shift_plain(DType dtype, std::byte* entries, uint32_t count, float up, float down) {
    shift_any<4>(dtype, entries, count, up, down);
}

#if defined(__x86_64__)
#define CROSSDOCK_AVX2 __attribute__((target("avx2")))
#define CROSSDOCK_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))

template <typename Sum>
CROSSDOCK_AVX2 void sums_avx2(DType dtype, const std::byte* entries, uint32_t count, SignSums& sums) {
    sums_any<Sum, 32 / sizeof(Sum)>(dtype, entries, count, sums);
}
CROSSDOCK_AVX2 void shift_avx2(DType dtype, std::byte* entries, uint32_t count, float up, float down) {
    shift_any<8>(dtype, entries, count, up, down);
}
template <typename Sum>
CROSSDOCK_AVX512 void sums_avx512(DType dtype, const std::byte* entries, uint32_t count, SignSums& sums) {
    sums_any<Sum, 64 / sizeof(Sum)>(dtype, entries, count, sums);
}
CROSSDOCK_AVX512 void shift_avx512(DType dtype, std::byte* entries, uint32_t count, float up, float down) {
    shift_any<16>(dtype, entries, count, up, down);
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
