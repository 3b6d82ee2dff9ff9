// SPDX-License-Identifier: Apache-2.0
// SiLU and its derivative with the same bits on every machine, CPU or GPU. The libraries' exp differ in their last
// bits, so this one is made of IEEE operations only; the files that include it are compiled without contraction of
// products and sums.
#pragma once

#ifdef __CUDACC__
#define CROSSDOCK_HOST_DEVICE __host__ __device__
#else
#define CROSSDOCK_HOST_DEVICE
#endif

#include <cmath>

namespace crossdock::demo {

// e^x for |x| <= 700, relative error below 1e-15.
CROSSDOCK_HOST_DEVICE inline double portable_exp(double x) {
    constexpr double kLn2High =
        0x1.62e42fee00000p-1;  // 32 significant bits: its products with small integers are exact
    constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
    const double power = floor(x * 1.4426950408889634 + 0.5);
    const double rest = (x - power * kLn2High) - power * kLn2Low;  // |rest| <= 0.35
    double sum = 1.0;
    for (int term = 13; term > 0; --term) {
        sum = 1.0 + sum * rest / term;
    }
    return ldexp(sum, static_cast<int>(power));
}

CROSSDOCK_HOST_DEVICE inline double sigmoid(float x) {
    const double bounded = x < -700.0f ? -700.0 : x > 700.0f ? 700.0 : static_cast<double>(x);
    return 1.0 / (1.0 + portable_exp(-bounded));
}

CROSSDOCK_HOST_DEVICE inline float silu(float x) {
    const double bounded = x < -700.0f ? -700.0 : x > 700.0f ? 700.0 : static_cast<double>(x);
    return static_cast<float>(static_cast<double>(x) / (1.0 + portable_exp(-bounded)));
}

// Its derivative.
CROSSDOCK_HOST_DEVICE inline float silu_slope(float x) {
    const double part = sigmoid(x);
    return static_cast<float>(part * (1.0 + static_cast<double>(x) * (1.0 - part)));
}

}  // namespace crossdock::demo
