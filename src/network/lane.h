// SPDX-License-Identifier: Apache-2.0
// Tracks which frames of a lane have landed. The sender numbers them; they may land in any order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>

namespace crossdock::network {

class Lane {
  public:
    // Returns false if it has landed before, or is outside the receive window.
    bool land(uint64_t number) {
        if (number < base_ || number - base_ >= kMaxAhead) return false;
        const uint64_t ahead = number - base_;
        if (ahead == 0 && landed_.empty()) {
            ++base_;
            return true;
        }
        if (ahead >= landed_.size()) landed_.resize(ahead + 1, false);
        if (landed_[ahead]) return false;
        landed_[ahead] = true;
        while (!landed_.empty() && landed_.front()) {
            landed_.pop_front();
            ++base_;
        }
        return true;
    }

    // True if all frames from `first` to `last` have landed.
    bool has_landed(uint64_t first, uint64_t last) const {
        if (last < base_) return true;
        if (last - base_ >= landed_.size()) return false;
        const auto from = landed_.begin() + static_cast<std::ptrdiff_t>(std::max(first, base_) - base_);
        const auto to = landed_.begin() + static_cast<std::ptrdiff_t>(last - base_) + 1;
        return std::all_of(from, to, [](bool landed) { return landed; });
    }

  private:
    static constexpr uint64_t kMaxAhead = uint64_t{1} << 20;
    uint64_t base_ = 0;        // all below have landed
    std::deque<bool> landed_;  // from base_ on
};

}  // namespace crossdock::network
