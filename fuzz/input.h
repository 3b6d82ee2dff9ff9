// SPDX-License-Identifier: Apache-2.0
// The fuzzer's bytes, read as decisions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crossdock::fuzz {

class Input {
  public:
    Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}

    bool is_empty() const { return position_ >= size_; }

    // Zeroes after the end.
    uint8_t byte() {
        if (position_ >= size_) return 0;
        const uint8_t change = position_ == changed_at_ ? change_ : uint8_t{0};
        return static_cast<uint8_t>(data_[position_++] + change);
    }

    // So many bytes from here, another byte is read than is there.
    void change(size_t distance, uint8_t by) {
        changed_at_ = position_ + distance;
        change_ = by;
    }

    uint32_t below(uint32_t bound) { return byte() % bound; }

    // Rarely true, and false after the end: for what is wrong on purpose.
    bool rarely() { return byte() >= 240; }

    // `usual`, or rarely one of the numbers at the edges.
    uint32_t or_edge(uint32_t usual) {
        static constexpr uint32_t kEdges[] = {0, 1, 3, 17, 0x7fffffff, 0x80000000, 0xffffffff, 0xfffffff0};
        return rarely() ? kEdges[below(8)] : usual;
    }

    bool operator==(const Input& other) const { return position_ == other.position_; }

  private:
    const uint8_t* data_;
    size_t size_;
    size_t position_ = 0;
    size_t changed_at_ = SIZE_MAX;
    uint8_t change_ = 0;
};

}  // namespace crossdock::fuzz
