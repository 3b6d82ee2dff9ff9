// SPDX-License-Identifier: Apache-2.0
#include "demo/board.h"

#include <cmath>

namespace crossdock::demo {

void Comparison::add(double value, double expected, double bound) {
    const double error = std::fabs(value - expected);
    ++num_values;
    num_nonzero += expected != 0;
    // Written so that a NaN counts as too large.
    num_above_bound += !(error <= bound);
    if (!(error <= largest_error)) {
        largest_error = error;
        bound_of_largest = bound;
    }
    if (bound > 0 && !(error / bound <= largest_part)) {
        largest_part = error / bound;
    }
}

void Comparison::add(const Comparison& other) {
    num_values += other.num_values;
    num_nonzero += other.num_nonzero;
    num_above_bound += other.num_above_bound;
    if (!(other.largest_error <= largest_error)) {
        largest_error = other.largest_error;
        bound_of_largest = other.bound_of_largest;
    }
    if (!(other.largest_part <= largest_part)) {
        largest_part = other.largest_part;
    }
}

}  // namespace crossdock::demo
