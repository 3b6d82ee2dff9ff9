// SPDX-License-Identifier: Apache-2.0
// GPUs and drivers that a build does not run on are ncclInvalidUsage, with one line that says what is there, what is
// needed and what to do.
#include "runtime/gpu_support.h"

#include <gtest/gtest.h>

#include "messages.h"

namespace crossdock {
namespace {

const Gpu kTuring{1, "Tesla T4", 75};
const Gpu kAmpere{0, "NVIDIA A10", 86};

void expect_one_line(const std::string& message, const std::vector<std::string>& parts) {
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    expect_mentions(message, parts);
}

TEST(GpuSupport, GpusBeforeAmpereAreTooOld) {
    expect_one_line(message_of([] { expect_new_enough(kTuring); }, ncclInvalidUsage),
                    {"GPU 1 (Tesla T4, compute capability 7.5)", "8.0 or newer", "CPU backends"});
    for (const int capability : {80, 86, 87, 89, 90, 100, 103, 110, 120, 121})
        EXPECT_NO_THROW(expect_new_enough({0, "GPU", capability})) << capability;
}

TEST(GpuSupport, ABuildWithoutCodeSaysForWhatItHasSome) {
    expect_one_line(message_of([] { fail_without_code(kAmpere, "90, 100f", "no kernel image"); }, ncclInvalidUsage),
                    {"GPU 0 (NVIDIA A10, compute capability 8.6)", "90, 100f", "no kernel image", "pip install .",
                     "CROSSDOCK_CUDA_ARCHITECTURES=86"});
}

TEST(GpuSupport, DriversMayBeOlderThanTheToolkitWithinItsMajorVersion) {
    EXPECT_NO_THROW(expect_driver(13000, 13000));
    EXPECT_NO_THROW(expect_driver(13000, 13020));
    EXPECT_NO_THROW(expect_driver(14000, 13000));
    expect_one_line(message_of([] { expect_driver(12080, 13020); }, ncclInvalidUsage),
                    {"driver is for CUDA 12.8", "13.0 or newer", "install"});
    expect_one_line(message_of([] { expect_driver(0, 13020); }, ncclInvalidUsage), {"no CUDA driver", "13.0"});
}

}  // namespace
}  // namespace crossdock
