// SPDX-License-Identifier: Apache-2.0
#include "demo/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <unordered_map>

namespace crossdock::demo {
namespace {

namespace fs = std::filesystem;

// Bytes of UTF-8 beyond ASCII count as letters.
bool is_word_byte(unsigned char byte) { return std::isalnum(byte) || byte >= 0x80 || byte == '\''; }

void append_tokens(const std::string& content, Text& text, std::unordered_map<std::string, uint32_t>& numbers) {
    size_t position = 0;
    while (position < content.size()) {
        const auto byte = static_cast<unsigned char>(content[position]);
        if (std::isspace(byte) || std::iscntrl(byte)) {
            ++position;
            continue;
        }
        size_t end = position + 1;
        if (is_word_byte(byte)) {
            while (end < content.size() && is_word_byte(static_cast<unsigned char>(content[end]))) {
                ++end;
            }
        }
        std::string word = content.substr(position, end - position);
        std::transform(word.begin(), word.end(), word.begin(),
                       [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
        const auto [entry, is_new] = numbers.try_emplace(word, static_cast<uint32_t>(text.words.size()));
        if (is_new) {
            text.words.push_back(word);
        }
        text.tokens.push_back(entry->second);
        position = end;
    }
}

Text read_files(const std::vector<fs::path>& paths, std::string name) {
    Text text;
    text.name = std::move(name);
    std::unordered_map<std::string, uint32_t> numbers;
    for (const fs::path& path : paths) {
        std::ifstream file(path, std::ios::binary);
        std::ostringstream content;
        content << file.rdbuf();
        if (!file) {
            throw std::runtime_error(fmt::format("--text: {} cannot be read", path.string()));
        }
        text.num_bytes += content.str().size();
        append_tokens(content.str(), text, numbers);
    }
    return text;
}

// Regular files, sorted by name; links would bring the same text twice.
std::vector<fs::path> files_in(const fs::path& folder, const std::string& extension) {
    std::vector<fs::path> paths;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(folder, error)) {
        if (entry.is_regular_file() && !entry.is_symlink() &&
            (extension.empty() || entry.path().extension() == extension)) {
            paths.push_back(entry.path());
        }
    }
    std::sort(paths.begin(), paths.end());
    return paths;
}

}  // namespace

Text read_text(const std::string& path) {
    Text text;
    if (!path.empty()) {
        if (!fs::is_regular_file(path)) {
            throw std::runtime_error(fmt::format("--text: {} is not a file that can be read", path));
        }
        text = read_files({path}, path);
    } else if (const auto licences = files_in("/usr/share/common-licenses", ""); !licences.empty()) {
        text = read_files(licences, "/usr/share/common-licenses");
    } else {
        std::vector<fs::path> documents = files_in(CROSSDOCK_SOURCE_FOLDER, ".md");
        const auto more = files_in(fs::path(CROSSDOCK_SOURCE_FOLDER) / "docs", ".md");
        documents.insert(documents.end(), more.begin(), more.end());
        text = read_files(documents, "this project's documents");
    }
    if (text.tokens.empty()) {
        throw std::runtime_error(fmt::format("--text: {} holds no words", text.name));
    }
    return text;
}

}  // namespace crossdock::demo
