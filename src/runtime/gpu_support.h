// SPDX-License-Identifier: Apache-2.0
// Which GPUs and drivers a build for GPUs runs on, and what it says of others. Needs no CUDA.
#pragma once

#include <string>

namespace crossdock {

inline constexpr int kLeastComputeCapability = 80;  // asynchronous copies into shared memory, and mbarriers

struct Gpu {
    int number;
    std::string name;
    int compute_capability;  // 10 * major + minor
};

// Throws ncclInvalidUsage if the driver is older than the CUDA that this library was built with. Versions: 1000 * major
// + 10 * minor, as CUDA counts; driver: 0 if there is none.
void expect_driver(int driver, int toolkit);

// Throws ncclInvalidUsage if no version of this library has code for the GPU.
void expect_new_enough(const Gpu& gpu);

// Throws ncclInvalidUsage: this build has no code for the GPU. architectures: that it was built for, as the build names
// them; reason: CUDA's.
[[noreturn]] void fail_without_code(const Gpu& gpu, const std::string& architectures, const std::string& reason);

}  // namespace crossdock
