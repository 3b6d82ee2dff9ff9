// SPDX-License-Identifier: Apache-2.0
#include "conformance/support/overlap.h"

#include <algorithm>
#include <cstring>

namespace crossdock::testing {

Overlap::Overlap(RankContext& context, cudaStream_t stream, ncclEpHandle_t handle, const Problem& problem,
                 uint32_t block_rows, uint32_t done_value)
    : context_(context), block_rows_(block_rows), slots_(static_cast<uint32_t>(problem.slots())) {
    if (problem.is_ht()) slots_ = static_cast<uint32_t>(std::min<size_t>(slots_, problem.row_limit()));
    layout_ = OverlapLayout::of(static_cast<uint32_t>(problem.num_blocks()), slots_, block_rows);
    size_t words = 0;
    RANK_OK(context, crossdockOverlapWords(handle, block_rows, &words));
    RANK_CHECK(context, words * sizeof(uint32_t) == layout_.bytes(), "{} words, expected {} bytes", words,
               layout_.bytes());
    memory_ = std::make_unique<Buffer>(context, stream, words * sizeof(uint32_t));
    const std::vector<std::byte> zeros(memory_->bytes());
    memory_->write(zeros);
    Tensor tensor(ncclUint32, {words}, *memory_);
    crossdockOverlap_t overlap = CROSSDOCK_OVERLAP_INIT;
    overlap.block_rows = block_rows;
    overlap.done_value = problem.is_ht() ? 0 : done_value;
    overlap.memory = tensor;
    RANK_OK(context, crossdockHandleSetOverlap(handle, &overlap));
}

OverlapConsumer Overlap::consumer() const { return {memory_->data(), layout_.zones, slots_, block_rows_}; }

std::vector<uint32_t> Overlap::read() const {
    const std::vector<std::byte> bytes = memory_->read();
    std::vector<uint32_t> words(bytes.size() / sizeof(uint32_t));
    std::memcpy(words.data(), bytes.data(), bytes.size());
    return words;
}

void Overlap::check(const std::vector<uint32_t>& rows_of_zones) const {
    const std::vector<uint32_t> words = read();
    const uint32_t turn = latest_turn(words);
    RANK_CHECK(context_, words[OverlapLayout::kFinishing] == 0, "a finished dispatch is still finishing");
    for (uint32_t zone = 0; zone < layout_.zones; ++zone) {
        const uint32_t rows = rows_of_zones[zone];
        RANK_CHECK(context_, words[layout_.count(turn, zone)] == rows + 1, "zone {} has {} rows, the word says {}",
                   zone, rows, words[layout_.count(turn, zone)]);
        for (uint32_t block = 0; block < layout_.blocks; ++block) {
            const uint32_t left = rows - std::min(rows, block * block_rows_);
            const uint32_t expected = std::min(left, block_rows_);
            const uint32_t seen = words[layout_.ready(turn, zone, block)];
            RANK_CHECK(context_, seen == expected, "block {} of zone {} has {} rows, the word says {}", block, zone,
                       expected, seen);
        }
    }
    const auto* const other = &words[layout_.half(turn + 1)];
    const bool is_clear = std::all_of(other, other + layout_.half_words(), [](uint32_t word) { return word == 0; });
    RANK_CHECK(context_, is_clear, "the next turn's words are not clear");
}

void Overlap::mark_done() {
    std::vector<uint32_t> words = read();
    auto* const done = &words[layout_.done(latest_turn(words), 0, 0)];
    std::fill(done, done + size_t{layout_.zones} * layout_.blocks, kDoneValue);
    memory_->write(words.data(), words.size() * sizeof(uint32_t));
}

}  // namespace crossdock::testing
