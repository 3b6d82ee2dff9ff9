// SPDX-License-Identifier: Apache-2.0
// What the command lines of the tools have in common: one message for a wrong argument, exit status 2.
#pragma once

#include <CLI/CLI.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace crossdock::tools {

inline constexpr int kUsageStatus = 2;

// A whole number from low to high; the message names the value and the range.
CLI::Validator integer_range(int64_t low, int64_t high);

// The same for a number with a fraction.
CLI::Validator number_range(double low, double high);

// One of the words.
CLI::Validator one_of(std::vector<std::string> words);

// A file that can be written; it is made if it is not there, and nothing in it changes.
CLI::Validator writable_file();

// Parses. Holds the exit status where the program must end: 0 after --help, kUsageStatus after a message on stderr.
std::optional<int> parse_command_line(CLI::App& app, int argc, char** argv);

// Says `message` on stderr as the program's; returns kUsageStatus.
int refuse(const CLI::App& app, const std::string& message);

// At the end of a program: its status or, with a message, 1 if not all that it has printed could be written.
int flushed(const char* program, int status);

}  // namespace crossdock::tools
