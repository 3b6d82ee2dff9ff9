// SPDX-License-Identifier: Apache-2.0
// A ring of staging memory. Pieces are taken in order, returned in any order, and reused once all earlier ones are
// back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>

namespace crossdock::network {

// Maximum payload of frames from and to device memory.
inline constexpr uint64_t kStagedPieceBytes = uint64_t{512} << 10;

class StagingRing {
  public:
    StagingRing() = default;
    explicit StagingRing(std::span<std::byte> memory) : memory_(memory) {}

    // Returns null if there is no room.
    std::byte* take(uint64_t bytes);
    void give_back(const std::byte* piece);

  private:
    static constexpr uint64_t kAlignment = 256;
    struct Piece {
        uint64_t offset, bytes;
        bool is_free;
    };
    std::span<std::byte> memory_;
    std::deque<Piece> pieces_;  // oldest first
};

}  // namespace crossdock::network
