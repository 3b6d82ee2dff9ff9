// SPDX-License-Identifier: Apache-2.0
// The arguments of an operation that all ranks must agree on, as one word: each rank publishes its own when it enters
// the operation, and compares its peers' before it uses their data. Hosts turn a difference into a message.
#pragma once

#include "device/tagged_word.h"

namespace crossdock {

// Fields are as wide as their values need, or fold them (Terms::fold). What ranks agree on when they make a group (the
// number of experts, budgets, their policy) is not here.
enum class Term : uint32_t {
    kOperation,  // OperationKind
    kTopk,
    kRowUnits,    // row_bytes / kRowUnitBytes
    kDtype,       // ncclDataType_t of rows
    kLayout,      // ncclEpLayout_t
    kRecipe,      // of quantization, or a combine's format on the wire; meaning by operation. LL, elastic: of the tag
    kDirection,   // forward or backward; elastic: weights travel
    kScaleUnits,  // bytes of a row's forwarded scales / kRowUnitBytes; elastic: scales of a row
    kSums,        // crossdockSums_t
    kSpare,       // HT: a part of HtAgreed. LL, elastic: of the tag
    kRouting,     // HT: which one is used, the number of the operation that made it. LL dispatch: WindowTerm
    kNumTerms
};

inline constexpr uint32_t kRowUnitBytes = 16;

// In Term::kRecipe of an LL dispatch, beside the recipe: scales are rounded to powers of two.
inline constexpr uint64_t kRoundedScales = 8;

// High throughput: what ranks also agree on, known to the host alone.
struct HtAgreed {
    static constexpr uint32_t kTagBits = 10, kSmsBits = 8;
    static constexpr uint32_t kRecipeBits = 2;  // what is left of Term::kRecipe

    uint64_t tag = 0;  // the caller's (crossdockHandleSetTag)
    uint64_t sms = 0;  // blocks of a dispatch or combine, each of which has rings with one block of every peer
};

// A hash of `bits` bits, for values that are compared and not read.
CROSSDOCK_HOST_DEVICE constexpr uint64_t hash_of(uint64_t value, uint32_t bits) {
    value = (value ^ value >> 32) * 0xD6E8FEB86659FD93;
    return ((value ^ value >> 32) * 0x9E3779B97F4A7C15) >> (64 - bits);
}

struct Terms {
    uint64_t word = 0;

    CROSSDOCK_HOST_DEVICE static constexpr uint32_t bits_of(uint32_t term) {
        constexpr uint32_t kBits[] = {3, 7, 12, 4, 2, 4, 1, 7, 1, 6, 17};
        static_assert(sizeof(kBits) / sizeof(kBits[0]) == static_cast<uint32_t>(Term::kNumTerms),
                      "every term has a width");
        return kBits[term];
    }
    CROSSDOCK_HOST_DEVICE static constexpr uint32_t shift_of(Term term) {
        uint32_t shift = 0;
        for (uint32_t i = 0; i < static_cast<uint32_t>(term); ++i) shift += bits_of(i);
        return shift;
    }
    CROSSDOCK_HOST_DEVICE static constexpr uint64_t max_of(Term term) {
        return (uint64_t{1} << bits_of(static_cast<uint32_t>(term))) - 1;
    }
    // All ones in a term's field.
    CROSSDOCK_HOST_DEVICE static constexpr uint64_t mask_of(Term term) { return max_of(term) << shift_of(term); }
    CROSSDOCK_HOST_DEVICE constexpr Terms with(Term term, uint64_t value) const {
        return {(word & ~mask_of(term)) | (value << shift_of(term) & mask_of(term))};
    }
    // The same for a value that may be larger than the field.
    CROSSDOCK_HOST_DEVICE constexpr Terms with_folded(Term term, uint64_t value) const {
        return with(term, fold(bits_of(static_cast<uint32_t>(term)), value));
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t get(Term term) const { return word >> shift_of(term) & max_of(term); }

    // HtAgreed takes bits that are free in high throughput: an update names no routing, and has a tag only; from the
    // routing that others name follow top-k and layout, which need no bits then, and their recipes take two.
    constexpr Terms with_agreed(const HtAgreed& agreed, bool is_update) const {
        uint64_t value = is_update ? agreed.tag : agreed.tag | agreed.sms << HtAgreed::kTagBits;
        Terms terms = without_agreed(is_update);
        for (uint64_t free = free_bits(is_update); free != 0; free &= free - 1, value >>= 1)
            terms.word |= (value & 1) != 0 ? free & (~free + 1) : 0;
        return terms;
    }
    constexpr HtAgreed agreed(bool is_update) const {
        uint64_t value = 0;
        uint32_t bit = 0;
        for (uint64_t free = free_bits(is_update); free != 0; free &= free - 1, ++bit)
            value |= (word & free & (~free + 1)) != 0 ? uint64_t{1} << bit : 0;
        return {value & ((1u << HtAgreed::kTagBits) - 1), value >> HtAgreed::kTagBits};
    }
    constexpr Terms without_agreed(bool is_update) const { return {word & ~free_bits(is_update)}; }
    static constexpr uint64_t free_bits(bool is_update) {
        if (is_update) return ((uint64_t{1} << HtAgreed::kTagBits) - 1) << shift_of(Term::kRouting);
        const uint64_t recipes = mask_of(Term::kRecipe) & (mask_of(Term::kRecipe) << HtAgreed::kRecipeBits);
        return mask_of(Term::kTopk) | mask_of(Term::kLayout) | recipes | mask_of(Term::kSums) | mask_of(Term::kSpare);
    }

    // LL, elastic: the caller's tag, in fields that other operations use.
    constexpr Terms with_tag(uint64_t tag) const {
        return with(Term::kRecipe, tag).with(Term::kSpare, tag >> bits_of(static_cast<uint32_t>(Term::kRecipe)));
    }
    constexpr uint64_t tag() const {
        return get(Term::kSpare) << bits_of(static_cast<uint32_t>(Term::kRecipe)) | get(Term::kRecipe);
    }

    // A value of fewer than `bits` bits is kept; a larger one becomes a 1 followed by a hash, so that two different
    // ones are seldom equal.
    CROSSDOCK_HOST_DEVICE static constexpr uint64_t fold(uint32_t bits, uint64_t value) {
        const uint64_t top = uint64_t{1} << (bits - 1);
        return value < top ? value : top | hash_of(value, bits - 1);
    }
    CROSSDOCK_HOST_DEVICE static constexpr bool is_hash(uint32_t bits, uint64_t folded) {
        return folded >> (bits - 1) != 0;
    }
};

static_assert(Terms::shift_of(Term::kNumTerms) <= 64, "all terms fit into one word");
static_assert(Terms{~uint64_t{0}}.agreed(false).sms == (1u << HtAgreed::kSmsBits) - 1 &&
                  Terms{~uint64_t{0}}.agreed(true).tag == (1u << HtAgreed::kTagBits) - 1 &&
                  Terms{~uint64_t{0}}.tag() == (1u << HtAgreed::kTagBits) - 1,
              "there are as many free bits as needed");

// The upper bits of an LL dispatch's terms: which outputs of the rank peers may write directly, and a hash of where
// they lie in their windows; 0: none. Peers write at their own offsets, so ranks that offer the same parts must agree.
// Ranks that offer different parts write none of each other's.
struct WindowTerm {
    static constexpr uint32_t kBits = 17;
    static constexpr uint32_t kPartBits = 2;
    static constexpr uint32_t kShift = 64 - kBits;

    CROSSDOCK_HOST_DEVICE static constexpr bool only_windows_differ(uint64_t terms, uint64_t others) {
        return (terms ^ others) << kBits == 0;
    }
    // Both ranks may pass these: they differ at most in windows that neither writes.
    CROSSDOCK_HOST_DEVICE static constexpr bool are_alike(uint64_t terms, uint64_t others) {
        const uint64_t differ = terms ^ others;
        constexpr uint64_t kParts = (uint64_t{1} << kPartBits) - 1;
        return differ == 0 || (differ << kBits == 0 && (differ >> kShift & kParts) != 0);
    }
};

static_assert(Terms::shift_of(Term::kRouting) == WindowTerm::kShift &&
                  Terms::bits_of(static_cast<uint32_t>(Term::kRouting)) == WindowTerm::kBits,
              "windows of low latency have the place of routings");

// Where a tensor begins: the window's number, the same on all ranks (0: it has none), and the offset there.
struct WindowPlace {
    uint64_t window = 0;
    uint64_t offset = 0;

    constexpr uint64_t hash() const { return hash_of(hash_of(window, 63) + offset, 63); }
};

// LL: the WindowTerm of a rank that offers these parts of its outputs (DirectPart).
constexpr uint64_t window_term(uint32_t parts, const WindowPlace& tokens, const WindowPlace& scales) {
    const uint64_t places = ((parts & 1) != 0 ? tokens.hash() : 0) + 3 * ((parts & 2) != 0 ? scales.hash() : 0);
    return parts == 0 ? 0 : hash_of(places, WindowTerm::kBits - WindowTerm::kPartBits) << WindowTerm::kPartBits | parts;
}

// HT: where a rank's rows begin in its window, for a message: folded, in units of 16 bytes.
inline constexpr uint32_t kWindowUnits = 16;
constexpr uint64_t folded_window_offset(uint64_t offset) {
    return Terms::fold(static_cast<uint32_t>(kPayloadBits), offset / kWindowUnits);
}

}  // namespace crossdock
