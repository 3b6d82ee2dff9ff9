// SPDX-License-Identifier: Apache-2.0
// What all ranks of an operation must pass alike, as one word: each rank publishes its own when it enters the
// operation, and compares its peers' before it uses anything else of theirs. Hosts turn a difference into a message.
#pragma once

#include "device/numeric.h"
#include "device/wait.h"

namespace crossdock {

// Fields are as wide as their values need.
enum class Term : uint32_t {
    kOperation,  // OperationKind
    kTopk,
    kRowUnits,   // row_bytes / kRowUnitBytes
    kDtype,      // DType of rows
    kLayout,     // ncclEpLayout_t
    kRecipe,     // of quantisation, or a combine's format on the wire; meaning by operation
    kDirection,  // forward or backward
    kBudget,     // policy of a bounded number of received rows
    kNumExperts,
    kNumTerms
};

inline constexpr uint32_t kRowUnitBytes = 16;
inline constexpr uint32_t kTermBits[] = {4, 7, 20, 3, 3, 4, 2, 3, 17};

struct Terms {
    uint64_t word = 0;

    CROSSDOCK_HOST_DEVICE static constexpr uint32_t shift_of(Term term) {
        uint32_t shift = 0;
        for (uint32_t i = 0; i < static_cast<uint32_t>(term); ++i) shift += kTermBits[i];
        return shift;
    }
    CROSSDOCK_HOST_DEVICE static constexpr uint64_t max_of(Term term) {
        return (uint64_t{1} << kTermBits[static_cast<uint32_t>(term)]) - 1;
    }
    CROSSDOCK_HOST_DEVICE constexpr Terms with(Term term, uint64_t value) const {
        const uint64_t mask = max_of(term) << shift_of(term);
        return {(word & ~mask) | (value << shift_of(term) & mask)};
    }
    CROSSDOCK_HOST_DEVICE constexpr uint64_t get(Term term) const { return word >> shift_of(term) & max_of(term); }
};

static_assert(sizeof(kTermBits) / sizeof(kTermBits[0]) == static_cast<uint32_t>(Term::kNumTerms),
              "every term has a width");
static_assert(Terms::shift_of(Term::kNumTerms) <= 64, "all terms fit into one word");

}  // namespace crossdock
