// SPDX-License-Identifier: Apache-2.0
// Text that came from another process, for messages, which may be printed to a terminal.
#pragma once

#include <cstddef>
#include <cstring>
#include <string>

namespace crossdock {

// The text up to its first zero byte, at most `most` bytes. What is no printable ASCII character becomes '?'.
inline std::string printable(const char* text, size_t most) {
    std::string shown(text, strnlen(text, most));
    for (char& each : shown) {
        if (each < ' ' || each > '~') each = '?';
    }
    return shown;
}

}  // namespace crossdock
