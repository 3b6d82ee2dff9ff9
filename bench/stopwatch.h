// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>

namespace crossdock::bench {

// What a call takes, us.
template <class Call>
double time_us(const Call& call) {
    const auto before = std::chrono::steady_clock::now();
    call();
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - before).count();
}

}  // namespace crossdock::bench
