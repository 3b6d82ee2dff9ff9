// SPDX-License-Identifier: Apache-2.0
// The library's one exception: a result code and the sentence for crossdockGetLastError. It never crosses the C
// boundary (api/boundary.h).
#pragma once

#include <fmt/format.h>

#include <exception>
#include <string>
#include <utility>

#include "nccl.h"

namespace crossdock {

class Error : public std::exception {
  public:
    Error(ncclResult_t code, std::string sentence) : code_(code), sentence_(std::move(sentence)) {}
    ncclResult_t code() const { return code_; }
    const char* what() const noexcept override { return sentence_.c_str(); }

  private:
    ncclResult_t code_;
    std::string sentence_;
};

// Throw an Error whose sentence names the argument, the value and the allowed range.
template <typename... Args>
[[noreturn]] void fail(ncclResult_t code, fmt::format_string<Args...> sentence, Args&&... args) {
    throw Error(code, fmt::format(sentence, std::forward<Args>(args)...));
}

template <typename... Args>
void require(bool condition, ncclResult_t code, fmt::format_string<Args...> sentence, Args&&... args) {
    if (!condition) fail(code, sentence, std::forward<Args>(args)...);
}

}  // namespace crossdock
