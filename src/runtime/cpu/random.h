// SPDX-License-Identifier: Apache-2.0
// A small seeded generator (splitmix64). Unlike the standard library's distributions it is the same on all platforms.
#pragma once

#include <cstdint>

#include "device/platform.h"

namespace crossdock::cpu {

class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed) {}

    uint64_t next() { return mix(state_ += 0x9e3779b97f4a7c15u); }

    // Uniform in 0..bound-1; bound > 0.
    uint64_t below(uint64_t bound) {
        return static_cast<uint64_t>((static_cast<unsigned __int128>(next()) * bound) >> 64);
    }

    bool one_in(uint64_t n) { return below(n) == 0; }

    static uint64_t mix(uint64_t value) {
        value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
        value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
        return value ^ (value >> 31);
    }

  private:
    uint64_t state_;
};

}  // namespace crossdock::cpu
