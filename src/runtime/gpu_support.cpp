// SPDX-License-Identifier: Apache-2.0
#include "runtime/gpu_support.h"

#include <fmt/format.h>

#include "core/error.h"

namespace crossdock {
namespace {

std::string described(const Gpu& gpu) {
    return fmt::format("GPU {} ({}, compute capability {}.{})", gpu.number, gpu.name, gpu.compute_capability / 10,
                       gpu.compute_capability % 10);
}

std::string version(int code) { return fmt::format("{}.{}", code / 1000, code % 1000 / 10); }

}  // namespace

void expect_driver(int driver, int toolkit) {
    require(driver > 0, ncclInvalidUsage, "there is no CUDA driver: install NVIDIA's driver for CUDA {} or newer",
            version(toolkit / 1000 * 1000));
    // Within a major version, drivers run what newer toolkits have built.
    require(driver / 1000 >= toolkit / 1000, ncclInvalidUsage,
            "the driver is for CUDA {}, and this library needs {} or newer: install a newer driver", version(driver),
            version(toolkit / 1000 * 1000));
}

void expect_new_enough(const Gpu& gpu) {
    require(
        gpu.compute_capability >= kLeastComputeCapability, ncclInvalidUsage,
        "{} is too old: Crossdock needs compute capability {}.{} or newer (A100, RTX 30); use a newer GPU, or the CPU "
        "backends",
        described(gpu), kLeastComputeCapability / 10, kLeastComputeCapability % 10);
}

void fail_without_code(const Gpu& gpu, const std::string& architectures, const std::string& reason) {
    fail(ncclInvalidUsage,
         "{}: this build has code for {}, and none that runs here ({}): build it on this machine (pip install .), or "
         "with "
         "CROSSDOCK_CUDA_ARCHITECTURES={}",
         described(gpu), architectures, reason, gpu.compute_capability);
}

}  // namespace crossdock
