// SPDX-License-Identifier: Apache-2.0
// A program without a fitting NCCL gets one message that says what was found where and what to do, and may try again.
#include "fabric/cuda/nccl_api.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "fabric/cuda/nccl_communicator.h"
#include "messages.h"

namespace crossdock {
namespace {

class NcclLoader : public testing::Test {
  protected:
    void SetUp() override {
        if (dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD) != nullptr) GTEST_SKIP() << "NCCL is loaded in this process";
    }

    // The message of the loader's failure where CROSSDOCK_NCCL_LIBRARY names file.
    static std::string message_for(const char* file) {
        setenv("CROSSDOCK_NCCL_LIBRARY", file, 1);
        return message_of(nccl_api, ncclInvalidUsage);
    }
};

TEST_F(NcclLoader, NamesTheFileThatIsMissing) {
    expect_mentions(message_for("/nowhere/libnccl.so.2"), {"no NCCL", "CROSSDOCK_NCCL_LIBRARY is /nowhere/libnccl.so.2",
                                                           "cannot open shared object file", "2.30.4"});
}

TEST_F(NcclLoader, RefusesAnOldVersionByName) {
    expect_mentions(message_for(OLD_NCCL), {"NCCL 2.28.9", OLD_NCCL, "2.30.4 or newer", "CROSSDOCK_NCCL_LIBRARY"});
}

TEST_F(NcclLoader, NamesTheFunctionThatIsMissing) {
    expect_mentions(message_for(PARTIAL_NCCL), {PARTIAL_NCCL, "lacks ncclGetErrorString"});
}

TEST_F(NcclLoader, NoCommunicatorComesFromNowhere) {
    setenv("CROSSDOCK_NCCL_LIBRARY", "/nowhere/libnccl.so.2", 1);
    int object = 0;
    const auto ask = [&] { nccl_communicator_of(reinterpret_cast<ncclComm_t>(&object)); };
    expect_mentions(message_of(ask, ncclInvalidUsage), {"no NCCL", "crossdock.h"});
}

TEST(NcclCommunicatorOf, RefusesNull) {
    message_of([] { nccl_communicator_of(nullptr); }, ncclInvalidArgument);
}

TEST(NcclVersionText, ReadsBothWaysOfCounting) {
    EXPECT_EQ(nccl_version_text(23004), "2.30.4");
    EXPECT_EQ(nccl_version_text(22809), "2.28.9");
    EXPECT_EQ(nccl_version_text(2708), "2.7.8");
}

}  // namespace
}  // namespace crossdock
