// SPDX-License-Identifier: Apache-2.0
// A kernel's call, with which messages about it begin. Formatted only when a message is made.
#pragma once

#include <fmt/format.h>

#include "gin/race_detector.h"

namespace crossdock::gin {

struct Caller {
    Who who;
    const char* what;
    crossdockWhere where;
};

}  // namespace crossdock::gin

template <>
struct fmt::formatter<crossdock::gin::Caller> {
    constexpr auto parse(format_parse_context& context) { return context.begin(); }
    template <typename Context>
    auto format(const crossdock::gin::Caller& caller, Context& context) const {
        using crossdock::gin::RaceDetector;
        return fmt::format_to(context.out(), "{}: {} at {}", RaceDetector::name(caller.who), caller.what,
                              RaceDetector::name(caller.where));
    }
};
