// SPDX-License-Identifier: Apache-2.0
// The phases of an HT kernel's warps, which repeat the same work, for timelines (device/timeline.h), with their names
// there.
#pragma once

#include <iterator>

#include "device/timeline.h"

namespace crossdock {

enum class Phase : uint32_t {
    kDispatchBegin,    // until all peers have entered
    kDispatchStage,    // claims a token, waits for a stage
    kDispatchTarget,   // finds the row's places, waits for credits
    kDispatchLoad,     // waits for the row
    kDispatchStore,    // sends it
    kDispatchReceive,  // all of a receiver's work
    kDispatchWeights,  // all of a weight warp's
    kDispatchEnd,      // waits for its stores and the block
    kCombineBegin = kMostSteps,
    kCombineSlot,    // finds rows to return, or waits for them or a credit
    kCombineStage,   // waits for a stage, or for a load into it
    kCombineSum,     // sums expert-major rows into it
    kCombineStore,   // loads flat rows; sends a stage
    kCombineRows,    // finds a token's rows, waits for them
    kCombineAdd,     // sums them
    kCombineCredit,  // returns their credits
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
