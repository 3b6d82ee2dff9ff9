// SPDX-License-Identifier: Apache-2.0
// Two GPUs count as linked by NVLink only if NVML says so, if they are the same one, or if they are on two hosts.
#include "fabric/cuda/nvlink.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "messages.h"

namespace crossdock {
namespace {

GpuPlace place(char last_byte) {
    GpuPlace::Uuid uuid;
    for (size_t i = 0; i < uuid.size(); ++i) uuid[i] = static_cast<char>(0x11 * i);
    uuid.back() = last_byte;
    return GpuPlace::of(uuid);
}

GpuPlace on_another_host(GpuPlace gpu) {
    gpu.host.fill('x');
    return gpu;
}

std::string why_not(char own, char peer) { return why_no_nvlink(place(own), place(peer), IMITATION_NVML); }

TEST(Nvlink, LinksWhatNvmlLinks) {
    EXPECT_EQ(why_not(0, 2), "");
    EXPECT_EQ(why_not(3, 1), "");
}

TEST(Nvlink, NamesGpusThatItDoesNotLink) {
    expect_mentions(why_not(0, 1), {"NVLink does not link", "GPU-00112233-4455-6677-8899-aabbccddee00",
                                    "GPU-00112233-4455-6677-8899-aabbccddee01"});
}

TEST(Nvlink, AGpuThatIsNotVisibleIsNotLinked) {
    expect_mentions(why_not(0, 8), {"NVML does not find GPU-00112233-4455-6677-8899-aabbccddee08", "code 6"});
}

TEST(Nvlink, TheSameGpuNeedsNoLink) { EXPECT_EQ(why_no_nvlink(place(1), place(1), "/nowhere/nvml.so"), ""); }

TEST(Nvlink, OnlyNvlinkJoinsHosts) {
    EXPECT_EQ(why_no_nvlink(place(0), on_another_host(place(1)), "/nowhere/nvml.so"), "");
}

TEST(Nvlink, SaysWhyNvmlCannotBeAsked) {
    expect_mentions(why_no_nvlink(place(0), place(2), "/nowhere/nvml.so"),
                    {"NVML cannot be opened", "/nowhere/nvml.so", "cannot open shared object file"});
    expect_mentions(why_no_nvlink(place(0), place(2), PARTIAL_NVML), {"NVML lacks nvmlInit_v2"});
    setenv("IMITATED_NVML_CODE", "9", 1);
    expect_mentions(why_not(0, 2), {"nvmlInit_v2 failed with code 9"});
    unsetenv("IMITATED_NVML_CODE");
}

}  // namespace
}  // namespace crossdock
