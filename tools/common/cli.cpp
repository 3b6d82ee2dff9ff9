// SPDX-License-Identifier: Apache-2.0
#include "tools/common/cli.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>

namespace crossdock::tools {
namespace {

template <class Number>
bool parse_number(const std::string& text, Number& number) {
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, number);
    return error == std::errc() && stop == end;
}

template <class Number>
CLI::Validator range(Number low, Number high, const char* kind, std::string label) {
    return CLI::Validator(
        [=](std::string& text) {
            Number number{};
            if (parse_number(text, number) && number >= low && number <= high) {
                return std::string();
            }
            return fmt::format("'{}' is not {} from {} to {}", text, kind, low, high);
        },
        std::move(label));
}

}  // namespace

CLI::Validator integer_range(int64_t low, int64_t high) {
    return range<int64_t>(low, high, "a whole number", fmt::format("{}..{}", low, high));
}

CLI::Validator number_range(double low, double high) {
    return range<double>(low, high, "a number", fmt::format("{}..{}", low, high));
}

CLI::Validator one_of(std::vector<std::string> words) {
    std::string list = fmt::format("{}", fmt::join(words, ", "));
    std::string label = fmt::format("{}", fmt::join(words, "|"));
    return CLI::Validator(
        [words = std::move(words), list = std::move(list)](std::string& text) {
            if (std::find(words.begin(), words.end(), text) != words.end()) {
                return std::string();
            }
            return fmt::format("'{}' is not one of {}", text, list);
        },
        std::move(label));
}

CLI::Validator writable_file() {
    return CLI::Validator(
        [](std::string& path) {
            std::FILE* file = std::fopen(path.c_str(), "a");
            if (file == nullptr) {
                return fmt::format("'{}' cannot be written: {}", path, std::strerror(errno));
            }
            std::fclose(file);
            return std::string();
        },
        "FILE");
}

std::optional<int> parse_command_line(CLI::App& app, int argc, char** argv) {
    try {
        app.parse(argc, argv);
        return std::nullopt;
    } catch (const CLI::CallForHelp&) {
        fmt::print("{}", app.help());
        return 0;
    } catch (const CLI::ParseError& error) {
        return refuse(app, error.what());
    }
}

int refuse(const CLI::App& app, const std::string& message) {
    fmt::print(stderr, "{}: {} ({} --help lists the options)\n", app.get_name(), message, app.get_name());
    return kUsageStatus;
}

int flushed(const char* program, int status) {
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return status;
    fmt::print(stderr, "{}: not all of the output could be written\n", program);
    return status == 0 ? 1 : status;
}

}  // namespace crossdock::tools
