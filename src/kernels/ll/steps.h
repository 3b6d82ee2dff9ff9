// SPDX-License-Identifier: Apache-2.0
// The steps of the LL kernels in timelines (device/timeline.h), with their names there.
#pragma once

#include <iterator>

#include "device/timeline.h"

namespace crossdock {

enum class Step : uint32_t {
    kDispatchBegin,
    kDispatchReady,     // earlier kernels have finished
    kDispatchFetching,  // the load of the first row is issued
    kDispatchHead,      // epoch, buffer and credits are known
    kDispatchPlanned,   // slots are known
    kDispatchLoaded,    // the row is in its stage
    kDispatchStored,    // its stores are issued
    kDispatchLanded,    // they have landed
    kDispatchFlagged,   // its flags are stored
    kDispatchCounts,    // every source's counts have arrived
    kDispatchHeader,    // the latest header has arrived
    kDispatchArrived,   // the latest row has arrived
    kDispatchPlaced,    // and is in its final places
    kDispatchEnd,
    kCombineBegin = kMostSteps,
    kCombineReady,
    kCombineHead,
    kCombineLoaded,
    kCombineStored,
    kCombineLanded,
    kCombineFlagged,
    kCombineListed,   // a token's cells are known
    kCombineArrived,  // its rows have arrived
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
