// SPDX-License-Identifier: Apache-2.0
// What tests ask of errors and their messages.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "core/error.h"

namespace crossdock {

// The message of the error that the action throws, which must have this code.
inline std::string message_of(const std::function<void()>& action, ncclResult_t code) {
    try {
        action();
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), code) << error.what();
        return error.what();
    }
    ADD_FAILURE() << "no error";
    return {};
}

inline void expect_mentions(const std::string& message, const std::vector<std::string>& parts) {
    for (const std::string& part : parts)
        EXPECT_NE(message.find(part), std::string::npos) << message << " lacks: " << part;
}

}  // namespace crossdock
