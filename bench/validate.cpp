// SPDX-License-Identifier: Apache-2.0
#include "bench/validate.h"

#include <algorithm>
#include <vector>

#include "crossdock/error.hpp"

namespace crossdock::bench {

Validation sum_over_ranks(const tools::RankContext& context, const Validation& own) {
    std::vector<Validation> all(static_cast<size_t>(context.num_ranks));
    check(crossdockCommAllGather(context.host, &own, all.data(), sizeof own));
    Validation total;
    for (const Validation& one : all) {
        total.num_rows += one.num_rows;
        total.wrong_rows += one.wrong_rows;
        total.num_values += one.num_values;
        total.wrong_values += one.wrong_values;
        total.largest_part = std::max(total.largest_part, one.largest_part);
    }
    return total;
}

}  // namespace crossdock::bench
