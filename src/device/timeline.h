// SPDX-License-Identifier: Apache-2.0
// When each warp of a kernel came to each of its steps: only in builds with CROSSDOCK_TIMELINE, where every kernel
// leaves the times of its latest run in device memory (HACKING.md says how to draw them).
#pragma once

#include "device/platform.h"

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
    kCombineBegin,
    kCombineReady,
    kCombineHead,
    kCombineLoaded,
    kCombineStored,
    kCombineLanded,
    kCombineFlagged,
    kCombineListed,   // a token's cells are known
    kCombineArrived,  // its rows are here
    kCombineSummed,
    kCombineEnd,
    kNumSteps
};
inline constexpr uint32_t kNumSteps = static_cast<uint32_t>(Step::kNumSteps);

CROSSDOCK_HOST_DEVICE constexpr bool is_begin(Step step) {
    return step == Step::kDispatchBegin || step == Step::kCombineBegin;
}

inline constexpr uint32_t kTimelineBlocks = 160;
inline constexpr uint32_t kTimelineWarps = 16;

}  // namespace crossdock
