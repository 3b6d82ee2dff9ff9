// SPDX-License-Identifier: Apache-2.0
// Numbers and flags in environment variables, for the library and the network plugin, which warn in different ways. A
// variable counts as unset if it is empty or, after a warning, if its value is not allowed.
#pragma once

#include <fmt/format.h>
#include <strings.h>

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>

namespace crossdock {

using Warn = void (*)(const std::string& line);

// A whole number from 1 to `largest`.
inline std::optional<uint64_t> environment_number(const char* name, uint64_t largest, Warn warn) {
    const char* value = std::getenv(name);
    if (value == nullptr || *value == '\0') return std::nullopt;
    uint64_t number = 0;
    const char* end = value + std::strlen(value);
    const auto [stopped_at, error] = std::from_chars(value, end, number);
    if (error == std::errc{} && stopped_at == end && number >= 1 && number <= largest) return number;
    warn(fmt::format("{}={} is ignored, allowed: 1..{}", name, value, largest));
    return std::nullopt;
}

inline std::optional<bool> environment_flag(const char* name, Warn warn) {
    const char* value = std::getenv(name);
    if (value == nullptr || *value == '\0') return std::nullopt;
    for (const char* yes : {"1", "on", "true"}) {
        if (strcasecmp(value, yes) == 0) return true;
    }
    for (const char* no : {"0", "off", "false"}) {
        if (strcasecmp(value, no) == 0) return false;
    }
    warn(fmt::format("{}={} is ignored, allowed: 1, on, true, 0, off, false", name, value));
    return std::nullopt;
}

// A timeout that the variable holds in ms. A deadline, now + timeout, does not overflow.
inline std::optional<uint64_t> environment_timeout_ns(const char* name, Warn warn) {
    constexpr uint64_t kNsPerMs = 1'000'000;
    const auto ms = environment_number(name, UINT64_MAX / kNsPerMs / 2, warn);
    return ms ? std::optional(*ms * kNsPerMs) : std::nullopt;
}

}  // namespace crossdock
