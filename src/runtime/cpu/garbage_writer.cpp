// SPDX-License-Identifier: Apache-2.0
#include "runtime/cpu/garbage_writer.h"

#include <algorithm>
#include <cstring>

namespace crossdock::cpu {
namespace {

constexpr uint64_t kStream =
    0x6e6f6e73656e7365;             // own random stream, so that a seed's schedule begins as without the fault
constexpr uint64_t kMostWords = 8;  // at once
constexpr uint64_t kMostSearched = 4096;

}  // namespace

GarbageWriter::GarbageWriter(int num_ranks, uint64_t seed)
    : random_(Random::mix(seed ^ kStream)),
      rank_(static_cast<int>(random_.below(static_cast<uint64_t>(num_ranks)))),
      one_step_in_(uint64_t{16} << random_.below(8)) {}

void GarbageWriter::reach(int rank, std::byte* memory, size_t bytes) {
    if (rank != rank_ && bytes >= sizeof(uint64_t)) pieces_.push_back({memory, bytes / sizeof(uint64_t)});
}

void GarbageWriter::forget(const std::byte* memory) {
    std::erase_if(pieces_, [&](const Piece& piece) { return piece.memory == memory; });
}

void GarbageWriter::step() {
    if (pieces_.empty() || !random_.one_in(one_step_in_)) return;
    const Piece& piece = pieces_[random_.below(pieces_.size())];
    const uint64_t first = draw_word(piece);
    const uint64_t end = std::min(first + 1 + random_.below(kMostWords), piece.words);
    for (uint64_t word_idx = first; word_idx < end; ++word_idx) {
        const uint64_t value = draw_value(piece, word_idx);
        std::memcpy(piece.memory + word_idx * sizeof(uint64_t), &value, sizeof(value));
    }
}

uint64_t GarbageWriter::load(const Piece& piece, uint64_t word_idx) const {
    uint64_t word = 0;
    std::memcpy(&word, piece.memory + word_idx * sizeof(uint64_t), sizeof(word));
    return word;
}

// Prefers words that a rank has written.
uint64_t GarbageWriter::draw_word(const Piece& piece) {
    const uint64_t first = random_.below(1 + ((piece.words - 1) >> random_.below(14)));
    if (random_.one_in(4)) return first;
    const uint64_t end = std::min(first + kMostSearched, piece.words);
    for (uint64_t word_idx = first; word_idx < end; ++word_idx) {
        if (load(piece, word_idx) != 0) return word_idx;
    }
    return first;
}

uint64_t GarbageWriter::draw_value(const Piece& piece, uint64_t word_idx) {
    const uint64_t any = random_.next();
    const uint64_t own = load(piece, word_idx);
    const uint64_t low_bits = (uint64_t{1} << random_.below(64)) - 1;
    switch (random_.below(8)) {
        case 0:
            return any;
        case 1:
            return uint64_t{1} << any % 64;
        case 2:
            return any % 256;
        case 3:
            return ~(any % 256);
        case 4:
            return own ^ uint64_t { 1 } << any % 64;
        case 5:
            return own + any % 17 - 8;
        case 6:
            return (own & ~low_bits) | (any & low_bits);
        default:
            return load(piece, draw_word(piece));
    }
}

}  // namespace crossdock::cpu
