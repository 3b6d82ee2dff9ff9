// SPDX-License-Identifier: Apache-2.0
// A simulated rank that writes nonsense into its peers' symmetric memory. It knows nothing of what is
// where: words near the beginning are drawn more often, and most values are made of words that are there, so that
// epochs and tags often are those of the operation at hand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/cpu/random.h"

namespace crossdock::cpu {

class NonsenseWriter {
  public:
    NonsenseWriter(int num_ranks, uint64_t seed);

    // Memory of a rank that its peers write, until forget(); bytes: a multiple of 8, or what is behind that stays.
    void reach(int rank, std::byte* memory, size_t bytes);
    void forget(const std::byte* memory);

    // Now and then some words are overwritten.
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
    int rank_;                   // who writes
    uint64_t one_step_in_;       // so many
    std::vector<Piece> pieces_;  // of the others, in the order of allocation
};

}  // namespace crossdock::cpu
