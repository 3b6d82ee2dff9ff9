// SPDX-License-Identifier: Apache-2.0
// crossdockHandleSetOverlap: checks the counters, and keeps them for the handle's next operations.
#include "core/overlap.h"

#include "core/error.h"
#include "core/ll/handle.h"

namespace crossdock {

RowBlocks LlHandle::overlap_blocks(unsigned int block_rows) const {
    const GroupConfig& config = group_->config();
    return is_expert_major() ? row_blocks(block_rows, config.experts_per_rank(), config.num_ranks * config.max_tokens)
                             : row_blocks(block_rows, config.num_ranks, config.max_tokens);
}

void LlHandle::set_overlap(const crossdockOverlap_t* caller) {
    group_->expect_working();
    if (caller == nullptr) {
        overlap_ = {};
        return;
    }
    const bool has_memory = caller->memory != nullptr;
    const bool has_done = caller->done != nullptr;
    require(has_memory || has_done, ncclInvalidArgument,
            "overlap->memory and overlap->done are NULL, expected at least one of them");
    require(caller->done_value > 0 || !has_done, ncclInvalidArgument,
            "overlap->done_value is 0, allowed with overlap->done: 1 and more");
    LlOverlap overlap{overlap_blocks(caller->block_rows), nullptr, caller->done_value};
    Communicator& communicator = group_->communicator();
    if (has_memory) overlap.memory = read_overlap_memory(communicator, *caller, overlap, group_->config().masking);
    if (has_done) {
        const Tensor words =
            read_overlap_words(communicator, caller->done, "overlap->done", size_t{overlap.zones} * overlap.blocks);
        if (words.ndim != 1) expect_shape(words, {overlap.zones, overlap.blocks}, "[zones, blocks], or one dimension");
        overlap.done = reinterpret_cast<const uint32_t*>(words.data);
    }
    overlap_ = overlap;
}

void LlHandle::expect_published() const {
    if (overlap_.done_value == 0 || overlap_.done != nullptr) return;
    require(published_.memory == overlap_.memory && published_.block_rows == overlap_.block_rows, ncclInvalidUsage,
            "the last dispatch has not published rows in overlap->memory, whose counters this combine would wait for: "
            "call crossdockHandleSetOverlap before ncclEpDispatch");
}

}  // namespace crossdock
