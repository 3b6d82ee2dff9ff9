// SPDX-License-Identifier: Apache-2.0
// Numbers and flags in environment variables: other values are ignored, with a warning that says so.
#include "core/environment_value.h"

#include <gtest/gtest.h>

namespace crossdock {
namespace {

constexpr const char* kName = "CROSSDOCK_TEST_MS";
std::string g_warning;

void note(const std::string& line) { g_warning = line; }

template <typename Read>
auto value_of(const char* text, Read read) {
    g_warning.clear();
    setenv(kName, text, 1);
    const auto value = read(kName, note);
    unsetenv(kName);
    return value;
}
std::optional<uint64_t> timeout_of(const char* text) { return value_of(text, environment_timeout_ns); }
std::optional<bool> flag_of(const char* text) { return value_of(text, environment_flag); }

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

TEST(EnvironmentFlag, IsOnOrOff) {
    for (const char* value : {"1", "on", "ON", "true"}) EXPECT_EQ(flag_of(value), true);
    for (const char* value : {"0", "off", "Off", "false"}) EXPECT_EQ(flag_of(value), false);
    EXPECT_EQ(flag_of(""), std::nullopt);
    EXPECT_EQ(g_warning, "");
    EXPECT_EQ(flag_of("yes"), std::nullopt);
    EXPECT_EQ(g_warning, fmt::format("{}=yes is ignored, allowed: 1, on, true, 0, off, false", kName));
}

}  // namespace
}  // namespace crossdock
