// SPDX-License-Identifier: Apache-2.0
#include "tools/common/terminal.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace crossdock::tools {
namespace {

bool is_dumb() {
    const char* term = std::getenv("TERM");
    return term == nullptr || std::string_view(term) == "dumb";
}

}  // namespace

bool stdout_has_colour() {
    static const bool has_colour = isatty(STDOUT_FILENO) == 1 && std::getenv("NO_COLOR") == nullptr && !is_dumb();
    return has_colour;
}

std::string paint(Colour colour, const std::string& text) {
    static constexpr const char* kCodes[] = {"0", "1", "2", "1;32", "1;31"};
    if (!stdout_has_colour() || colour == Colour::kPlain) {
        return text;
    }
    return fmt::format("\x1b[{}m{}\x1b[0m", kCodes[static_cast<int>(colour)], text);
}

std::string bar(double part, int width) {
    static constexpr const char* kEighths[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
    const int eighths = static_cast<int>(std::lround(std::clamp(part, 0.0, 1.0) * width * 8));
    std::string text;
    for (int column = 0; column < eighths / 8; ++column) {
        text += "█";
    }
    text += kEighths[eighths % 8];
    const int used = eighths / 8 + (eighths % 8 > 0 ? 1 : 0);
    return text + std::string(static_cast<size_t>(width - used), ' ');
}

std::string heat_cell(double part, const std::string& text, int width) {
    static constexpr const char* kBlocks[] = {" ", "░", "▒", "▓", "█"};
    // From dark blue to yellow in the terminal's 256 colours; black text from the middle on.
    static constexpr int kShades[] = {17, 18, 24, 30, 36, 71, 106, 142, 178, 220};
    part = std::clamp(part, 0.0, 1.0);
    if (stdout_has_colour()) {
        const int shade = std::min(static_cast<int>(part * 10), 9);
        return fmt::format("\x1b[48;5;{};38;5;{}m{:>{}} \x1b[0m", kShades[shade], shade < 5 ? 231 : 16, text,
                           width - 1);
    }
    const int block = std::min(static_cast<int>(part * 5), 4);
    return fmt::format("{:>{}}{}", text, width - 1, kBlocks[block]);
}

ProgressLine::ProgressLine() : is_terminal_(isatty(STDERR_FILENO) == 1 && !is_dumb()) {}

void ProgressLine::show(const std::string& text) {
    if (text == shown_) {
        return;
    }
    shown_ = text;
    is_terminal_ ? fmt::print(stderr, "\r\x1b[2K{}", text) : fmt::print(stderr, "{}\n", text);
    std::fflush(stderr);
}

void ProgressLine::clear() {
    if (is_terminal_ && !shown_.empty()) {
        fmt::print(stderr, "\r\x1b[2K");
        std::fflush(stderr);
    }
    shown_.clear();
}

}  // namespace crossdock::tools
