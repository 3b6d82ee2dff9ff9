// SPDX-License-Identifier: Apache-2.0
// The steps of the low-latency kernels in timelines (device/timeline.h), with their names there.
#pragma once

#include <iterator>

#include "device/timeline.h"

namespace crossdock {

enum class Step : uint32_t {
    kDispatchBegin,
    kDispatchReady,     // the kernels before are over
    kDispatchFetching,  // the first row is on its way into its stage
    kDispatchHead,      // epoch, buffer and credits are known
    kDispatchPlanned,   // slots are known
    kDispatchLoaded,    // the row is in its stage
    kDispatchStored,    // its stores are under way
    kDispatchLanded,    // they have landed
    kDispatchFlagged,   // and are announced
    kDispatchCounts,    // every source's counts are here
    kDispatchHeader,    // the latest header was here
    kDispatchArrived,   // the latest row was here
    kDispatchPlaced,    // and is in its places
    kDispatchEnd,
    kCombineBegin = kMostSteps,
    kCombineReady,
    kCombineHead,
    kCombineLoaded,
    kCombineStored,
    kCombineLanded,
    kCombineFlagged,
    kCombineListed,   // a token's cells are known
    kCombineArrived,  // its rows are here
    kCombineSummed,
    kCombineEnd
};

// The steps that both kernels have.
struct KernelSteps {
    Step begin;
    Step ready;
    Step head;
    Step end;
};

inline constexpr const char* kDispatchSteps[] = {"begin",  "ready",   "fetching", "head",    "planned",
                                                 "loaded", "stored",  "landed",   "flagged", "counts",
                                                 "header", "arrived", "placed",   "end"};
inline constexpr const char* kCombineSteps[] = {"begin",   "ready",  "head",    "loaded", "stored", "landed",
                                                "flagged", "listed", "arrived", "summed", "end"};
static_assert(std::size(kDispatchSteps) == static_cast<uint32_t>(Step::kDispatchEnd) + 1);
static_assert(std::size(kCombineSteps) == static_cast<uint32_t>(Step::kCombineEnd) - kMostSteps + 1);
static_assert(std::size(kDispatchSteps) <= kMostSteps && std::size(kCombineSteps) <= kMostSteps);

}  // namespace crossdock
