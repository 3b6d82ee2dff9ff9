// SPDX-License-Identifier: Apache-2.0
// A small generator whose numbers are the same with every compiler and standard library (SplitMix64, Steele et al.
// 2014).
#pragma once

#include <cstdint>

namespace crossdock::tools {

// A bijection of 64-bit words that leaves no visible pattern.
inline uint64_t mix_bits(uint64_t bits) {
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
    return bits ^ (bits >> 31);
}

class Random {
  public:
    explicit Random(uint64_t seed) : state_(mix_bits(seed + 1)) {}

    uint64_t next() {
        state_ += 0x9e3779b97f4a7c15u;
        return mix_bits(state_);
    }

    // Uniform in [0, bound); bound > 0. The bias, at most bound / 2^64, is of no importance here.
    uint64_t below(uint64_t bound) { return next() % bound; }

    // Uniform in [0, 1), a multiple of 2^-53.
    double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

    // Uniform in [-1, 1).
    float symmetric() { return static_cast<float>(uniform() * 2 - 1); }

  private:
    uint64_t state_;
};

}  // namespace crossdock::tools
