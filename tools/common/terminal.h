// SPDX-License-Identifier: Apache-2.0
// Text for people: colours where the output is a terminal, bars and shades everywhere.
#pragma once

#include <string>

namespace crossdock::tools {

// Whether stdout is a terminal that wants colours (NO_COLOR is not set, TERM is not dumb).
bool stdout_has_colour();

enum class Colour { kPlain, kBold, kDim, kGreen, kRed };

// `text` in that colour, or just `text` where stdout has none.
std::string paint(Colour colour, const std::string& text);

// A horizontal bar of `part` (0 to 1) of `width` columns, in eighths of a column, padded with spaces.
std::string bar(double part, int width);

// One cell of a heat map, `width` columns: `text` on a shade for `part` (0 to 1); in plain text a block character
// stands before the text.
std::string heat_cell(double part, const std::string& text, int width);

// One line on stderr that is replaced by the next one on a terminal; otherwise each is a line of its own.
class ProgressLine {
  public:
    ProgressLine();
    ~ProgressLine() { clear(); }
    void show(const std::string& text);
    void clear();
    bool is_terminal() const { return is_terminal_; }

  private:
    bool is_terminal_;
    std::string shown_;
};

}  // namespace crossdock::tools
