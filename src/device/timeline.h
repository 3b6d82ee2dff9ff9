// SPDX-License-Identifier: Apache-2.0
// When each warp of a kernel reached each of its steps. Only in builds with CROSSDOCK_TIMELINE, where every kernel
// leaves the times of its latest run in device memory (CONTRIBUTING.md says how to draw them).
//
// A mode numbers its kernels' steps (kernels/ll/steps.h) or phases (kernels/ht/phases.h): those of kernel k begin at
// k * kMostSteps, and the first one begins the kernel.
#pragma once

#include "device/platform.h"

namespace crossdock {

inline constexpr uint32_t kMostSteps = 16;  // of a kernel
inline constexpr uint32_t kTimelineKernels = 2;
inline constexpr uint32_t kTimelineSteps = kTimelineKernels * kMostSteps;
inline constexpr uint32_t kTimelineBlocks = 160;
inline constexpr uint32_t kTimelineWarps = 20;

CROSSDOCK_HOST_DEVICE constexpr bool begins_kernel(uint32_t step) { return step % kMostSteps == 0; }

// One warp's times, in cycles of its SM's clock.
struct PhaseTimes {
    uint32_t phase;  // the current one
    uint32_t sm;
    int64_t since;
    int64_t total[kTimelineSteps];
};

}  // namespace crossdock
