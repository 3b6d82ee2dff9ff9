// SPDX-License-Identifier: Apache-2.0
// Shuffles and votes of a warp of 32 threads. All lanes of the mask call together, each with the same mask.
#pragma once

#include <type_traits>

#include "crossdock/device/words.hpp"

namespace crossdock::device {

inline int lane() {
    return static_cast<int>((threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32);
}

// The value of lane `from`, or the lane's own if `from` is outside of the mask.
template <typename T>
T value_of_lane(unsigned mask, T value, int from) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 16, "shuffles move values of at most 16 bytes");
    T all[32] = {};
    crossdockExchange(mask, &value, sizeof(T), all);
    return (mask >> from & 1) != 0 ? all[from] : value;
}

}  // namespace crossdock::device

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const int first = crossdock::device::lane() & -width;
    return crossdock::device::value_of_lane(mask, value, first + (source & (width - 1)));
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int lane = crossdock::device::lane();
    const int from = lane - static_cast<int>(delta);
    return crossdock::device::value_of_lane(mask, value, from < (lane & -width) ? lane : from);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const int lane = crossdock::device::lane();
    const int from = lane + static_cast<int>(delta);
    return crossdock::device::value_of_lane(mask, value, from >= (lane & -width) + width ? lane : from);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    const int lane = crossdock::device::lane();
    const int from = lane ^ lanes;
    return crossdock::device::value_of_lane(mask, value, from >= (lane & -width) + width ? lane : from);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    uint8_t own = predicate != 0;
    uint8_t all[32] = {};
    crossdockExchange(mask, &own, 1, all);
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane) {
        if ((mask >> lane & 1) != 0 && all[lane] != 0) votes |= 1u << lane;
    }
    return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
// Lanes whose threads have not returned.
inline unsigned __activemask() { return crossdockActiveMask(); }

#define CROSSDOCK_REDUCE(name, expression)                            \
    inline unsigned name(unsigned mask, unsigned value) {             \
        unsigned all[32] = {};                                        \
        crossdockExchange(mask, &value, sizeof(value), all);          \
        unsigned a = all[__builtin_ctz(mask)];                        \
        for (int lane = __builtin_ctz(mask) + 1; lane < 32; ++lane) { \
            const unsigned b = all[lane];                             \
            if ((mask >> lane & 1) != 0) a = expression;              \
        }                                                             \
        return a;                                                     \
    }
CROSSDOCK_REDUCE(__reduce_add_sync, a + b)
CROSSDOCK_REDUCE(__reduce_min_sync, std::min(a, b))
CROSSDOCK_REDUCE(__reduce_max_sync, std::max(a, b))
#undef CROSSDOCK_REDUCE
