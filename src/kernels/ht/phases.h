// SPDX-License-Identifier: Apache-2.0
// What a warp of a high-throughput kernel, which does the same again and again, spends its time on, for timelines
// (device/timeline.h), with their names there.
#pragma once

#include <iterator>

#include "device/timeline.h"

namespace crossdock {

enum class Phase : uint32_t {
    kDispatchBegin,    // until all peers have entered
    kDispatchStage,    // claims a token, waits for a stage
    kDispatchTarget,   // looks its places up, waits for credits
    kDispatchLoad,     // waits for the row
    kDispatchStore,    // sends it on its way
    kDispatchReceive,  // all of a receiver's work
    kDispatchWeights,  // all of a weight warp's
    kDispatchEnd,      // waits for its stores and the block
    kCombineBegin = kMostSteps,
    kCombineSlot,    // looks rows to be returned up, waits for that or for a row's credit
    kCombineStage,   // waits for a stage, or for what comes into it
    kCombineSum,     // sums expert-major rows into it
    kCombineStore,   // loads flat rows; sends a stage
    kCombineRows,    // looks a token's rows up, waits for them
    kCombineAdd,     // sums them
    kCombineCredit,  // gives their places back
    kCombineEnd
};

inline constexpr const char* kDispatchPhases[] = {"begin", "stage",   "target",  "load",
                                                  "store", "receive", "weights", "end"};
inline constexpr const char* kCombinePhases[] = {"begin", "slot", "stage",  "sum", "store",
                                                 "rows",  "add",  "credit", "end"};
static_assert(std::size(kDispatchPhases) == static_cast<uint32_t>(Phase::kDispatchEnd) + 1);
static_assert(std::size(kCombinePhases) == static_cast<uint32_t>(Phase::kCombineEnd) - kMostSteps + 1);
static_assert(std::size(kDispatchPhases) <= kMostSteps && std::size(kCombinePhases) <= kMostSteps);

}  // namespace crossdock
