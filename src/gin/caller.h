// SPDX-License-Identifier: Apache-2.0
// The call of a kernel with which a message begins. It becomes text where a message needs it.
#pragma once

#include <fmt/format.h>

#include "gin/judge.h"

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
        using crossdock::gin::Judge;
        return fmt::format_to(context.out(), "{}: {} at {}", Judge::name(caller.who), caller.what,
                              Judge::name(caller.where));
    }
};
