// SPDX-License-Identifier: Apache-2.0
// Looking up what a caller passed for an enum of nccl_ep.h in its table (core/layouts.h, core/recipes.h).
#pragma once

#include <cstddef>
#include <string>

#include "core/error.h"
#include "nccl_ep.h"

namespace crossdock {

// InvalidArgument for bits that are not in the mode's part of the table; the message lists that part.
template <typename Row, size_t kNum>
const Row& row_of_mode(const Row (&table)[kNum], unsigned int bits, ncclEpAlgorithm_t mode, const char* argument) {
    for (const Row& row : table) {
        if (static_cast<unsigned int>(row.value) == bits && row.is_in(mode)) return row;
    }
    const bool is_ll = mode == NCCL_EP_ALGO_LOW_LATENCY;
    std::string allowed, elsewhere;
    for (const Row& row : table) {
        const auto value = static_cast<unsigned int>(row.value);
        if (row.is_in(mode)) {
            allowed += fmt::format("{}{} ({})", allowed.empty() ? "" : ", ", value, row.label);
        } else if (row.in_ll || row.in_ht) {
            elsewhere += fmt::format("; {} ({}) is for {} mode", value, row.label, is_ll ? "HT" : "LL");
        }
    }
    fail(ncclInvalidArgument, "{} is {}, allowed in {} mode: {}{}", argument, bits, is_ll ? "LL" : "HT", allowed,
         elsewhere);
}

}  // namespace crossdock
