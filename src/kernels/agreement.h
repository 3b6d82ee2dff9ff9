// SPDX-License-Identifier: Apache-2.0
// What all ranks of an operation must pass alike, as one word: each rank publishes its own when it enters the
// operation, and compares its peers' before it uses anything else of theirs. Hosts turn a difference into a message.
#pragma once

#include "device/numeric.h"
#include "device/wait.h"

namespace crossdock {

// Fields are as wide as their values need; of what needs more the lower bits. What a group's ranks have agreed on when
// they made it (the number of experts, budgets, their policy) is not here.
enum class Term : uint32_t {
    kOperation,  // OperationKind
    kTopk,
    kRowUnits,    // row_bytes / kRowUnitBytes
    kDtype,       // ncclDataType_t of rows
    kLayout,      // ncclEpLayout_t
    kRecipe,      // of quantisation, or a combine's format on the wire; meaning by operation
    kDirection,   // forward or backward
    kScaleBytes,  // of a row
    kSums,        // crossdockSums_t
    kRouting,     // which one is used: the number of the operation that made it
    kNumTerms
};

inline constexpr uint32_t kRowUnitBytes = 16;

// In Term::kRecipe of an LL dispatch, beside the recipe: scales are rounded to powers of two.
inline constexpr uint64_t kRoundedScales = 8;

struct Terms {
    uint64_t word = 0;

    CROSSDOCK_HOST_DEVICE static constexpr uint32_t bits_of(uint32_t term) {
        constexpr uint32_t kBits[] = {4, 7, 18, 4, 2, 4, 1, 12, 1, 11};
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
    // All ones in the field of a term.
    CROSSDOCK_HOST_DEVICE static constexpr uint64_t mask_of(Term term) { return max_of(term) << shift_of(term); }
    CROSSDOCK_HOST_DEVICE constexpr Terms with(Term term, uint64_t value) const {
        return {(word & ~mask_of(term)) | (value << shift_of(term) & mask_of(term))};
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t get(Term term) const { return word >> shift_of(term) & max_of(term); }
};

static_assert(Terms::shift_of(Term::kNumTerms) <= 64, "all terms fit into one word");

}  // namespace crossdock
