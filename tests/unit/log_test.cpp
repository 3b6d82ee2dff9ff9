// SPDX-License-Identifier: Apache-2.0
// The message of a failed call is printed where NCCL_DEBUG makes NCCL print warnings, and nowhere else.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "nccl_ep.h"

namespace crossdock {
namespace {

class NcclDebug : public testing::Test {
  protected:
    void SetUp() override {
        unsetenv("NCCL_DEBUG");
        unsetenv("NCCL_DEBUG_FILE");
    }
    void TearDown() override { SetUp(); }
};

// What a failing call writes to stderr.
std::string printed_by_a_failed_call() {
    testing::internal::CaptureStderr();
    EXPECT_EQ(ncclEpGetVersion(nullptr), ncclInvalidArgument);
    return testing::internal::GetCapturedStderr();
}

TEST_F(NcclDebug, PrintsFromWarnOn) {
    for (const char* level : {"WARN", "warn", "Info", "ABORT", "TRACE"}) {
        setenv("NCCL_DEBUG", level, 1);
        const std::string line = printed_by_a_failed_call();
        char host[256] = "";
        gethostname(host, sizeof(host) - 1);
        const std::string name = std::string(host).substr(0, std::string(host).find('.'));
        EXPECT_EQ(line, name + ":" + std::to_string(getpid()) + ":" + std::to_string(gettid()) +
                            " NCCL WARN crossdock: version is NULL\n")
            << level;
    }
}

TEST_F(NcclDebug, IsSilentOtherwise) {
    EXPECT_EQ(printed_by_a_failed_call(), "");
    for (const char* level : {"", "VERSION", "NONE", "WARNING", "1"}) {
        setenv("NCCL_DEBUG", level, 1);
        EXPECT_EQ(printed_by_a_failed_call(), "") << level;
    }
    setenv("NCCL_DEBUG", "WARN", 1);
    testing::internal::CaptureStderr();
    int version = 0;
    EXPECT_EQ(ncclEpGetVersion(&version), ncclSuccess);
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST_F(NcclDebug, AppendsToTheFile) {
    setenv("NCCL_DEBUG", "WARN", 1);
    const std::string prefix = testing::TempDir() + "nccl_debug_";
    setenv("NCCL_DEBUG_FILE", (prefix + "%h.%p").c_str(), 1);
    EXPECT_EQ(printed_by_a_failed_call(), "");
    EXPECT_EQ(printed_by_a_failed_call(), "");
    char host[256] = "";
    gethostname(host, sizeof(host) - 1);
    const std::string path =
        prefix + std::string(host).substr(0, std::string(host).find('.')) + "." + std::to_string(getpid());
    std::ifstream file(path);
    std::string first, second, third;
    std::getline(file, first);
    std::getline(file, second);
    EXPECT_NE(first.find("NCCL WARN crossdock: version is NULL"), std::string::npos) << first;
    EXPECT_EQ(first, second);
    EXPECT_FALSE(std::getline(file, third));
    std::filesystem::remove(path);
    // A file that cannot be opened takes nothing away.
    setenv("NCCL_DEBUG_FILE", "/nonexistent/folder/log", 1);
    EXPECT_NE(printed_by_a_failed_call().find("version is NULL"), std::string::npos);
}

}  // namespace
}  // namespace crossdock
