// SPDX-License-Identifier: Apache-2.0
// A kernel's call, with which messages about it begin. Formatted only when a message is made.
#pragma once

#include <fmt/format.h>

#include "device_api/race_detector.h"

namespace crossdock::device_api {

struct Caller {
    Who who;
    const char* what;
    crossdockWhere where;
};

}  // namespace crossdock::device_api

template <>
struct fmt::formatter<crossdock::device_api::Caller> {
    constexpr auto parse(format_parse_context& context) { return context.begin(); }
    template <typename Context>
    auto format(const crossdock::device_api::Caller& caller, Context& context) const {
        using crossdock::device_api::RaceDetector;
        return fmt::format_to(context.out(), "{}: {} at {}", RaceDetector::name(caller.who), caller.what,
                              RaceDetector::name(caller.where));
    }
};
