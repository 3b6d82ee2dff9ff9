// SPDX-License-Identifier: Apache-2.0
// Only for builds with CROSSDOCK_TIMELINE: writes the steps of the current device's latest kernel of a compiled file,
// except those with GIN peers (CONTRIBUTING.md says how to draw them).
#pragma once

#include <cuda_runtime.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

#include "device/context.h"
#include "kernels/ll/steps.h"

namespace crossdock {
namespace {

void write_steps(int rank, const char* kernel, Step begin, const auto& names, std::ios::openmode mode) {
    const char* folder = std::getenv("CROSSDOCK_TIMELINE_FOLDER");
    struct Times {
        int64_t clocks[kTimelineBlocks][kTimelineWarps][kTimelineSteps];
        uint64_t begin_ns[kTimelineBlocks][kTimelineWarps][kTimelineSteps];
    };
    const auto times = std::make_unique<Times>();
    int device = 0;
    int clock_khz = 0;
    if (folder == nullptr || cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device) != cudaSuccess ||
        cudaMemcpyFromSymbol(times->clocks, timeline_clocks, sizeof times->clocks) != cudaSuccess ||
        cudaMemcpyFromSymbol(times->begin_ns, timeline_begin_ns, sizeof times->begin_ns) != cudaSuccess)
        return;
    std::ofstream file(std::string(folder) + "/timeline-" + std::to_string(rank) + ".jsonl", mode);
    const uint32_t first = static_cast<uint32_t>(begin);
    // Blocks begin together, but their clocks differ.
    const uint64_t begin_of_all = times->begin_ns[0][0][first];
    for (uint32_t block = 0; block < kTimelineBlocks; ++block) {
        for (uint32_t warp = 0; warp < kTimelineWarps; ++warp) {
            for (uint32_t step = 0; step < std::size(names); ++step) {
                const int64_t clock = times->clocks[block][warp][first + step];
                const int64_t since = clock - times->clocks[block][warp][first];
                if (clock == 0 || since < 0) continue;  // a step of an earlier run
                file << "{\"rank\":" << rank << ",\"kernel\":\"" << kernel << "\",\"block\":" << block
                     << ",\"warp\":" << warp << ",\"step\":\"" << names[step]
                     << "\",\"ns\":" << begin_of_all + static_cast<uint64_t>(since * 1000000 / clock_khz) << "}\n";
            }
        }
    }
}

}  // namespace
}  // namespace crossdock
