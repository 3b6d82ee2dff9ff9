// SPDX-License-Identifier: Apache-2.0
// A2SGD in plain loops, as crossdock/a2sgd.h defines it.
#pragma once

#include <cstdint>
#include <vector>

#include "nccl_ep.h"

namespace crossdock::reference {

struct GradientPiece {
    ncclDataType_t type;
    std::vector<std::byte> bytes;

    size_t count() const;
    float at(size_t i) const;
};
using Gradient = std::vector<GradientPiece>;

struct SignMeans {
    double a = 0;
    double b = 0;
    uint64_t num_nonnegative = 0;
    int nonfinite_piece = -1;
};

// One loop over all entries, sums in fp64.
SignMeans plain_means(const Gradient& gradient);

// The same in the order that the header describes: columns in fp32, or all in fp64. Its bits are the library's.
SignMeans ordered_means(const Gradient& gradient, bool sums_in_fp64);

// Entries moved by their sign, rounded once.
Gradient moved(const Gradient& gradient, float up, float down);

}  // namespace crossdock::reference
