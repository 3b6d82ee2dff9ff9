// SPDX-License-Identifier: Apache-2.0
// Implements sign_sums.h with the compiler's vector types, for vectors of any width. A source includes this for one
// instruction set, with its functions' attribute in CROSSDOCK_SIGN_TARGET.
//
// Reading memory takes most of the time. A block of columns stays in registers for all rows of a chunk, since columns
// in memory would be read and written for every entry; the next chunks are prefetched.
#pragma once

#include <type_traits>

#include "a2sgd/device/sign_sums.h"

namespace crossdock::cpu {
namespace {

#define CROSSDOCK_INLINE CROSSDOCK_SIGN_TARGET __attribute__((always_inline)) inline

template <typename Element, uint32_t kNum>
using Vector __attribute__((vector_size(sizeof(Element) * kNum))) = Element;

// Formats: 2 * kNum neighbouring entries as two vectors of kNum floats, converted as device/numeric.h does. The first
// vector of an interleaved one has the entries with even numbers, the second the others.
template <uint32_t kNum>
struct F32 {
    static constexpr DType kDType = DType::kF32;
    static constexpr bool kIsInterleaved = false;
    using Value = Vector<float, kNum>;

    CROSSDOCK_INLINE static void load(const std::byte* source, Value& first, Value& second) {
        __builtin_memcpy(&first, source, sizeof(Value));
        __builtin_memcpy(&second, source + sizeof(Value), sizeof(Value));
    }
    CROSSDOCK_INLINE static void store(std::byte* target, const Value& first, const Value& second) {
        __builtin_memcpy(target, &first, sizeof(Value));
        __builtin_memcpy(target + sizeof(Value), &second, sizeof(Value));
    }
};

template <class Format, typename Value>
CROSSDOCK_INLINE void store_interleaved(std::byte* target, const Value& first, const Value& second) {
    typename Format::Bits low, high;
    Format::round(first, low);
    Format::round(second, high);
    const typename Format::Bits words = low | high << 16;
    __builtin_memcpy(target, &words, sizeof(words));
}

template <uint32_t kNum>
struct Bf16 {
    static constexpr DType kDType = DType::kBf16;
    static constexpr bool kIsInterleaved = true;
    using Value = Vector<float, kNum>;
    using Bits = Vector<uint32_t, kNum>;

    CROSSDOCK_INLINE static void load(const std::byte* source, Value& first, Value& second) {
        Bits words;
        __builtin_memcpy(&words, source, sizeof(words));
        first = reinterpret_cast<Value>(words << 16);
        second = reinterpret_cast<Value>(words & 0xFFFF0000u);
    }
    // Rounded, in the lower half of each word.
    CROSSDOCK_INLINE static void round(const Value& value, Bits& result) {
        const Bits bits = reinterpret_cast<Bits>(value);
        const Bits none = {};
        result = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
        result = (bits & 0x7FFFFFFFu) > 0x7F800000u ? none + 0x7FFFu : result;
    }
    CROSSDOCK_INLINE static void store(std::byte* target, const Value& first, const Value& second) {
        store_interleaved<Bf16>(target, first, second);
    }
};

// For processors that do not know the format.
template <uint32_t kNum>
struct F16 {
    static constexpr DType kDType = DType::kF16;
    static constexpr bool kIsInterleaved = true;
    using Value = Vector<float, kNum>;
    using Bits = Vector<uint32_t, kNum>;

    CROSSDOCK_INLINE static void convert(const Bits& bits, Value& value) {
        const Bits magnitude = bits & 0x7FFFu;
        const Value scaled = reinterpret_cast<Value>(magnitude << 13) * 0x1p112f;
        const Bits special = 0x7F800000u | (magnitude & 0x3FFu) << 13;
        const Bits chosen = magnitude >= 0x7C00u ? special : reinterpret_cast<Bits>(scaled);
        value = reinterpret_cast<Value>(chosen | (bits & 0x8000u) << 16);
    }
    CROSSDOCK_INLINE static void load(const std::byte* source, Value& first, Value& second) {
        Bits words;
        __builtin_memcpy(&words, source, sizeof(words));
        convert(words & 0xFFFFu, first);
        convert(words >> 16, second);
    }
    // Rounded, in the lower half of each word.
    CROSSDOCK_INLINE static void round(const Value& value, Bits& result) {
        const Bits bits = reinterpret_cast<Bits>(value);
        const Bits magnitude = bits & 0x7FFFFFFFu;
        const Bits none = {};
        const Bits subnormal = reinterpret_cast<Bits>(reinterpret_cast<Value>(magnitude) + 0.5f) - 0x3F000000u;
        const Bits normal = (magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
        const Bits finite = magnitude < 0x38800000u ? subnormal : normal;
        result = (magnitude >= 0x477FF000u ? none + 0x7C00u : finite) | (bits >> 16 & 0x8000u);
        result = magnitude > 0x7F800000u ? none + 0x7FFFu : result;
    }
    CROSSDOCK_INLINE static void store(std::byte* target, const Value& first, const Value& second) {
        store_interleaved<F16>(target, first, second);
    }
};

// For those that do: Isa loads and stores a vector of it.
template <class Isa, uint32_t kNum>
struct HardwareF16 {
    static constexpr DType kDType = DType::kF16;
    static constexpr bool kIsInterleaved = false;
    using Value = Vector<float, kNum>;

    CROSSDOCK_INLINE static void load(const std::byte* source, Value& first, Value& second) {
        Isa::load_f16(source, first);
        Isa::load_f16(source + sizeof(Value) / 2, second);
    }
    CROSSDOCK_INLINE static void store_one(std::byte* target, const Value& value) {
        const Vector<uint32_t, kNum> none = {};
        const Value nan = reinterpret_cast<Value>(none + 0x7FFFE000u);  // rounds to CUDA's spelling
        Isa::store_f16(target, value == value ? value : nan);
    }
    CROSSDOCK_INLINE static void store(std::byte* target, const Value& first, const Value& second) {
        store_one(target, first);
        store_one(target + sizeof(Value) / 2, second);
    }
};

// The columns of one vector. Isa: kNum, how many floats a vector has; F16Format, a format; Doubles, half as many of
// them; `widen`, a vector's halves as doubles; and `split` of doubles by sign, with 0 in the places of the others.
template <typename Sum, class Isa>
struct Columns {
    using Value = Vector<float, Isa::kNum>;
    using Bits = Vector<uint32_t, Isa::kNum>;
    Value up = {}, down = {};

    CROSSDOCK_INLINE void add(const Value& value, const Bits& is_positive) {
        up += reinterpret_cast<Value>(reinterpret_cast<Bits>(value) & is_positive);
        down -= reinterpret_cast<Value>(reinterpret_cast<Bits>(value) & ~is_positive);
    }
    CROSSDOCK_INLINE void join(const float* positive, const float* negative) {
        Value other_up, other_down;
        __builtin_memcpy(&other_up, positive, sizeof(Value));
        __builtin_memcpy(&other_down, negative, sizeof(Value));
        up += other_up;
        down += other_down;
    }
    CROSSDOCK_INLINE void store(float* positive, float* negative) const {
        __builtin_memcpy(positive, &up, sizeof(up));
        __builtin_memcpy(negative, &down, sizeof(down));
    }
};

template <class Isa>
struct Columns<double, Isa> {
    static constexpr uint32_t kHalf = Isa::kNum / 2;
    using Value = Vector<float, Isa::kNum>;
    using Bits = Vector<uint32_t, Isa::kNum>;
    using Doubles = Vector<double, kHalf>;
    Doubles low_up = {}, low_down = {}, high_up = {}, high_down = {};

    CROSSDOCK_INLINE static void add_half(const Doubles& half, Doubles& up, Doubles& down) {
        Doubles is_up, is_down;
        Isa::split(half, is_up, is_down);
        up += is_up;
        down -= is_down;
    }
    CROSSDOCK_INLINE void add(const Value& value, const Bits&) {
        Doubles low, high;
        Isa::widen(value, low, high);
        add_half(low, low_up, low_down);
        add_half(high, high_up, high_down);
    }
    CROSSDOCK_INLINE static void join_half(const double* source, Doubles& half) {
        Doubles other;
        __builtin_memcpy(&other, source, sizeof(Doubles));
        half += other;
    }
    CROSSDOCK_INLINE void join(const double* positive, const double* negative) {
        join_half(positive, low_up);
        join_half(positive + kHalf, high_up);
        join_half(negative, low_down);
        join_half(negative + kHalf, high_down);
    }
    CROSSDOCK_INLINE void store(double* positive, double* negative) const {
        __builtin_memcpy(positive, &low_up, sizeof(Doubles));
        __builtin_memcpy(positive + kHalf, &high_up, sizeof(Doubles));
        __builtin_memcpy(negative, &low_down, sizeof(Doubles));
        __builtin_memcpy(negative + kHalf, &high_down, sizeof(Doubles));
    }
};

// One thread gets all of a memory's bandwidth only from several places at once. Line `line` of the first quarter of the
// chunk four ahead, of the second quarter of the one three ahead, and so on: each line once, of four streams that are
// in order. What lies there need not be the gradient; fetching asks for nothing.
constexpr uint32_t kStreams = 4;
constexpr uint32_t kLineBytes = 64;

template <uint32_t kChunkBytes>
CROSSDOCK_INLINE void fetch(const std::byte* chunk, uint32_t line) {
#pragma GCC unroll 4
    for (uint32_t i = 0; i < kStreams; ++i)
        __builtin_prefetch(chunk + (kStreams - i) * kChunkBytes + i * (kChunkBytes / kStreams) + line * kLineBytes);
}

// A row's entries of one vector; the next one's. No loops over columns, and one vector after the other: that leaves the
// sums in registers.
template <typename Sum, class Isa>
CROSSDOCK_INLINE void add_vector(const Vector<float, Isa::kNum>& values, Columns<Sum, Isa>& columns,
                                 Vector<uint32_t, Isa::kNum>& counts) {
    using Bits = Vector<uint32_t, Isa::kNum>;
    const Bits are_positive = reinterpret_cast<Bits>(values >= 0.0f);
    columns.add(values, are_positive);
    counts -= are_positive;
}
template <class Format, typename Sum, class Isa>
CROSSDOCK_INLINE void add_pair(const std::byte* source, Columns<Sum, Isa>& first, Columns<Sum, Isa>& second,
                               Vector<uint32_t, Isa::kNum>& counts) {
    Vector<float, Isa::kNum> values, more;
    Format::load(source, values, more);
    add_vector(values, first, counts);
    add_vector(more, second, counts);
}

// Of a chunk: whole rows, and one more in a place of its own, or none.
struct Rows {
    const std::byte* entries;
    uint32_t count;
    const std::byte* last;
};

// The sums of columns [first, first + kBlock), halved with those of lower columns that have been stored: blocks come in
// ascending order, and what is left after the last one is a block at 0. Adds to `counts` the entries that are not
// negative.
template <class Format, typename Sum, class Isa, uint32_t kPairs>
CROSSDOCK_INLINE void add_block(const Rows& rows, uint32_t first, Sum* positive, Sum* negative,
                                Vector<uint32_t, Isa::kNum>& counts) {
    constexpr uint32_t kNum = Isa::kNum;
    constexpr uint32_t kBytes = dtype_bytes(Format::kDType);
    constexpr uint32_t kPairBytes = 2 * kNum * kBytes;
    constexpr uint32_t kBlockBytes = kPairs * kPairBytes;  // of a row
    constexpr uint32_t kRowsOfFetch = kStreams * kLineBytes / kBlockBytes;
    constexpr uint32_t kRows = kSignChunk / kSignColumns;
    static_assert(kRowsOfFetch > 0 && kRows % kRowsOfFetch == 0, "each line of a chunk is fetched once");
    static_assert(kPairs == 1 || kPairs == 2);
    Columns<Sum, Isa> a, b, c, d;
    const std::byte* source = rows.entries + first * kBytes;
    const uint32_t first_line = first * kBytes / kBlockBytes * (kRows / kRowsOfFetch);
    for (uint32_t row = 0; row < rows.count; ++row, source += kSignColumns * kBytes) {
        if (row % kRowsOfFetch == 0) fetch<kSignChunk * kBytes>(rows.entries, first_line + row / kRowsOfFetch);
        add_pair<Format>(source, a, b, counts);
        if constexpr (kPairs == 2) add_pair<Format>(source + kPairBytes, c, d, counts);
    }
    if (rows.last != nullptr) {
        source = rows.last + first * kBytes;
        add_pair<Format>(source, a, b, counts);
        if constexpr (kPairs == 2) add_pair<Format>(source + kPairBytes, c, d, counts);
    }
    positive += first;
    negative += first;
    for (uint32_t stride = kSignColumns / 2; first >= stride; stride /= 2) {
        first -= stride;
        positive -= stride;
        negative -= stride;
        a.join(positive, negative);
        b.join(positive + kNum, negative + kNum);
        if constexpr (kPairs == 2) {
            c.join(positive + 2 * kNum, negative + 2 * kNum);
            d.join(positive + 3 * kNum, negative + 3 * kNum);
        }
    }
    a.store(positive, negative);
    b.store(positive + kNum, negative + kNum);
    if constexpr (kPairs == 2) {
        c.store(positive + 2 * kNum, negative + 2 * kNum);
        d.store(positive + 3 * kNum, negative + 3 * kNum);
    }
}

// Halves a block. Columns of an interleaved format lie in pairs of vectors: the even ones, then the odd ones.
template <class Format, typename Sum, uint32_t kNum, uint32_t kBlock>
CROSSDOCK_INLINE double halve(Sum* block) {
    for (uint32_t stride = kBlock / 2; stride >= 2 * kNum; stride /= 2) {
#pragma GCC ivdep
        for (uint32_t i = 0; i < stride; ++i) block[i] += block[i + stride];
    }
    Sum columns[2 * kNum];
    for (uint32_t i = 0; i < 2 * kNum; ++i) columns[i] = block[Format::kIsInterleaved ? i % 2 * kNum + i / 2 : i];
    for (uint32_t stride = kNum; stride > 0; stride /= 2) {
        for (uint32_t i = 0; i < stride; ++i) columns[i] += columns[i + stride];
    }
    return columns[0];
}

template <class Format, typename Sum, class Isa>
CROSSDOCK_INLINE void sums_of(const std::byte* entries, uint32_t count, SignSums& sums) {
    constexpr uint32_t kNum = Isa::kNum;
    constexpr uint32_t kPairs = std::is_same_v<Sum, float> ? 2 : 1;
    constexpr uint32_t kBlock = kPairs * 2 * kNum;
    constexpr uint32_t kBytes = dtype_bytes(Format::kDType);
    alignas(64) Sum positive[kSignColumns];
    alignas(64) Sum negative[kSignColumns];
    alignas(64) std::byte last[kSignColumns * kBytes];
    Rows rows{entries, count / kSignColumns, nullptr};
    uint32_t num_zeros = 0;  // that fill the last row; they count as not negative
    if (const uint32_t rest = count % kSignColumns; rest > 0) {
        num_zeros = kSignColumns - rest;
        __builtin_memcpy(&last[0], entries + rows.count * kSignColumns * kBytes, rest * kBytes);
        __builtin_memset(&last[rest * kBytes], 0, num_zeros * kBytes);
        rows.last = &last[0];
    }
    Vector<uint32_t, kNum> counts = {};
    for (uint32_t first = 0; first < kSignColumns; first += kBlock)
        add_block<Format, Sum, Isa, kPairs>(rows, first, &positive[0], &negative[0], counts);
    uint32_t num_positive = 0;
    for (uint32_t lane = 0; lane < kNum; ++lane) num_positive += counts[lane];
    sums.num_positive = num_positive - num_zeros;
    sums.positive = halve<Format, Sum, kNum, kBlock>(&positive[0]);
    sums.negative = halve<Format, Sum, kNum, kBlock>(&negative[0]);
}

template <class Format, uint32_t kNum>
CROSSDOCK_INLINE void shift_of(std::byte* entries, uint32_t count, float up, float down) {
    using Value = Vector<float, kNum>;
    const Value zero = {};
    uint32_t i = 0;
    for (; i + 2 * kNum <= count; i += 2 * kNum) {
        std::byte* place = entries + i * dtype_bytes(Format::kDType);
        Value first, second;
        Format::load(place, first, second);
        first += first >= zero ? zero + up : zero + down;
        second += second >= zero ? zero + up : zero + down;
        Format::store(place, first, second);
    }
    for (; i < count; ++i) {
        const float value = load_element<Format::kDType>(entries, i);
        store_element<Format::kDType>(entries, i, value + (value >= 0 ? up : down));
    }
}

template <typename Sum, class Isa>
CROSSDOCK_SIGN_TARGET void sums_any(DType dtype, const std::byte* entries, uint32_t count, SignSums& sums) {
    switch (dtype) {
        case DType::kBf16:
            return sums_of<Bf16<Isa::kNum>, Sum, Isa>(entries, count, sums);
        case DType::kF16:
            return sums_of<typename Isa::F16Format, Sum, Isa>(entries, count, sums);
        case DType::kF32:
            return sums_of<F32<Isa::kNum>, Sum, Isa>(entries, count, sums);
    }
}

template <class Isa>
CROSSDOCK_SIGN_TARGET void shift_any(DType dtype, std::byte* entries, uint32_t count, float up, float down) {
    switch (dtype) {
        case DType::kBf16:
            return shift_of<Bf16<Isa::kNum>, Isa::kNum>(entries, count, up, down);
        case DType::kF16:
            return shift_of<typename Isa::F16Format, Isa::kNum>(entries, count, up, down);
        case DType::kF32:
            return shift_of<F32<Isa::kNum>, Isa::kNum>(entries, count, up, down);
    }
}

template <class Isa>
constexpr SignVariant variant_of(const char* name) {
    return {name, sums_any<float, Isa>, sums_any<double, Isa>, shift_any<Isa>};
}

}  // namespace
}  // namespace crossdock::cpu
