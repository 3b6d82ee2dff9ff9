// SPDX-License-Identifier: Apache-2.0
// A simulated rank that writes garbage into its peers' symmetric memory. It does not know the layout: words near the
// beginning are drawn more often, and most values derive from words in that memory, so that epochs and tags are often
// those of the current operation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/cpu/random.h"

namespace crossdock::cpu {

class GarbageWriter {
  public:
    GarbageWriter(int num_ranks, uint64_t seed);

    // Adds a rank's memory that peers may write, until forget(). Bytes beyond the last full word stay unchanged.
    void reach(int rank, std::byte* memory, size_t bytes);
    void forget(const std::byte* memory);

    // Overwrites some words in some of the calls.
    void step();

  private:
    struct Piece {
        std::byte* memory;
        uint64_t words;
    };
    uint64_t load(const Piece& piece, uint64_t word_idx) const;
    uint64_t draw_word(const Piece& piece);
    uint64_t draw_value(const Piece& piece, uint64_t word_idx);

    Random random_;
    int rank_;                   // the rank that writes
    uint64_t one_step_in_;       // one step in this many writes
    std::vector<Piece> pieces_;  // of the other ranks, in the order of allocation
};

}  // namespace crossdock::cpu
