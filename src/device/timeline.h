// SPDX-License-Identifier: Apache-2.0
// When each warp of a kernel came to each of its steps: only in builds with CROSSDOCK_TIMELINE, where every kernel
// leaves the times of its latest run in device memory (CONTRIBUTING.md says how to draw them).
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

// What a warp of a high-throughput kernel, which does the same again and again, spends its time on.
enum class Phase : uint32_t {
    kDispatchBegin,    // until all peers have entered
    kDispatchStage,    // claims a token, waits for a stage
    kDispatchTarget,   // looks its places up, waits for credits
    kDispatchLoad,     // waits for the row
    kDispatchStore,    // sends it on its way
    kDispatchReceive,  // all of a receiver's work
    kDispatchLabels,   // all of a labeller's
    kDispatchEnd,      // waits for its stores and the block
    kCombineBegin,
    kCombineSlot,    // looks rows to be returned up, waits for that or for a row's credit
    kCombineStage,   // waits for a stage, or for what comes into it
    kCombineSum,     // sums expert-major rows into it
    kCombineStore,   // loads flat rows; sends a stage home
    kCombineRows,    // looks a token's rows up, waits for them
    kCombineAdd,     // sums them
    kCombineCredit,  // gives their places back
    kCombineEnd,
    kNumPhases
};
inline constexpr uint32_t kNumPhases = static_cast<uint32_t>(Phase::kNumPhases);

CROSSDOCK_HOST_DEVICE constexpr bool is_begin(Phase phase) {
    return phase == Phase::kDispatchBegin || phase == Phase::kCombineBegin;
}
// The last phase of the kernel that has this one.
CROSSDOCK_HOST_DEVICE constexpr Phase end_of(Phase phase) {
    return phase <= Phase::kDispatchEnd ? Phase::kDispatchEnd : Phase::kCombineEnd;
}

inline constexpr uint32_t kTimelineBlocks = 160;
inline constexpr uint32_t kTimelineWarps = 20;

// Of one warp, in counts of its multiprocessor's clock.
struct PhaseTimes {
    Phase phase;  // that it is in
    uint32_t sm;
    int64_t since;
    int64_t total[kNumPhases];
};

}  // namespace crossdock
