// SPDX-License-Identifier: Apache-2.0
// Real text as a sequence of tokens: lower-case words and single punctuation marks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace crossdock::demo {

struct Text {
    std::string name;  // what was read, for people
    size_t num_bytes = 0;
    std::vector<uint32_t> tokens;    // indices into words
    std::vector<std::string> words;  // each once, in order of appearance
};

// Reads one file, or, with an empty path, the licence texts in /usr/share/common-licenses, or else this project's own
// documents. Throws std::runtime_error with a message where there is nothing to read.
Text read_text(const std::string& path);

}  // namespace crossdock::demo
