// SPDX-License-Identifier: Apache-2.0
// Numbers in environment variables: what is not a whole number in range is ignored, with a warning that says so.
#include "core/environment_number.h"

#include <gtest/gtest.h>

namespace crossdock {
namespace {

constexpr const char* kName = "CROSSDOCK_TEST_MS";
std::string g_warning;

std::optional<uint64_t> timeout_of(const char* value) {
    g_warning.clear();
    setenv(kName, value, 1);
    const auto timeout = environment_timeout_ns(kName, [](const std::string& line) { g_warning = line; });
    unsetenv(kName);
    return timeout;
}

TEST(EnvironmentNumber, TimeoutsAreWholeMilliseconds) {
    EXPECT_EQ(timeout_of("1"), 1'000'000);
    EXPECT_EQ(timeout_of("9223372036854"), 9'223'372'036'854'000'000);
    EXPECT_EQ(timeout_of(""), std::nullopt);
    EXPECT_EQ(g_warning, "");
}

TEST(EnvironmentNumber, WarnsOfOtherValuesAndIgnoresThem) {
    for (const char* value : {"0", "-1", "+1", " 1", "1.5", "1s", "abc", "9223372036855", "99999999999999999999"}) {
        EXPECT_EQ(timeout_of(value), std::nullopt);
        EXPECT_EQ(g_warning, fmt::format("{}={} is ignored, allowed: 1..9223372036854", kName, value));
    }
}

}  // namespace
}  // namespace crossdock
