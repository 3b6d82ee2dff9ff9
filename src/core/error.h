// SPDX-License-Identifier: Apache-2.0
// The library's one exception: a result code and the message for crossdockGetLastError. It never crosses the C
// boundary (core/boundary.h).
#pragma once

#include <fmt/format.h>

#include <exception>
#include <string>
#include <utility>

#include "nccl.h"

namespace crossdock {

class Error : public std::exception {
  public:
    Error(ncclResult_t code, std::string message) : code_(code), message_(std::move(message)) {}
    ncclResult_t code() const { return code_; }
    const char* what() const noexcept override { return message_.c_str(); }

  private:
    ncclResult_t code_;
    std::string message_;
};

// Throw an Error. The message names the argument, its value and the allowed range.
template <typename... Args>
[[noreturn]] void fail(ncclResult_t code, fmt::format_string<Args...> message, Args&&... args) {
    throw Error(code, fmt::format(message, std::forward<Args>(args)...));
}

template <typename... Args>
void require(bool condition, ncclResult_t code, fmt::format_string<Args...> message, Args&&... args) {
    if (!condition) fail(code, message, std::forward<Args>(args)...);
}

}  // namespace crossdock
