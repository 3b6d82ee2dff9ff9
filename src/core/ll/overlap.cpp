// SPDX-License-Identifier: Apache-2.0
// crossdockHandleSetOverlap: checks the counters, and keeps them for the handle's next operations.
#include <algorithm>

#include "core/error.h"
#include "core/ll/handle.h"
#include "crossdock/overlap.hpp"

namespace crossdock {
namespace {

constexpr uint32_t kMostBlockRows = 1u << 20;  // a block's word counts 1024 for each row

Tensor read_words(Communicator& communicator, const ncclEpTensor_t* caller, const char* name, size_t least) {
    const Tensor words = read_tensor(communicator, caller, name);
    expect_dtype(words, {ncclInt32, ncclUint32});
    require(words.num_elements() >= least, ncclInvalidArgument, "{} has {} elements, expected at least {}", name,
            words.num_elements(), least);
    return words;
}

}  // namespace

LlOverlap LlHandle::overlap_blocks(unsigned int block_rows) const {
    require(block_rows > 0, ncclInvalidArgument, "block_rows is 0, allowed: 1 and more");
    const GroupConfig& config = group_->config();
    const uint32_t all_tokens = config.num_ranks * config.max_tokens;
    LlOverlap overlap{};
    overlap.zones = is_expert_major() ? config.experts_per_rank() : config.num_ranks;
    overlap.slots = is_expert_major() ? all_tokens : config.max_tokens;
    overlap.block_rows = std::min(block_rows, overlap.slots);
    require(overlap.block_rows <= kMostBlockRows, ncclInvalidArgument, "block_rows is {}, allowed: at most {}",
            block_rows, kMostBlockRows);
    overlap.blocks = OverlapLayout::of(overlap.zones, overlap.slots, overlap.block_rows).blocks;
    return overlap;
}

size_t LlHandle::overlap_words(unsigned int block_rows) const {
    const LlOverlap overlap = overlap_blocks(block_rows);
    return OverlapLayout{overlap.zones, overlap.blocks}.bytes() / sizeof(uint32_t);
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
    require(!has_memory || !group_->config().masking, ncclInvalidUsage,
            "the group's enable_mask is 1, allowed with overlap->memory: 0");
    LlOverlap overlap = overlap_blocks(caller->block_rows);
    overlap.done_value = caller->done_value;
    Communicator& communicator = group_->communicator();
    if (has_memory) {
        const Tensor words =
            read_words(communicator, caller->memory, "overlap->memory", overlap_words(caller->block_rows));
        overlap.memory = reinterpret_cast<uint32_t*>(words.data);
    }
    if (has_done) {
        const Tensor words =
            read_words(communicator, caller->done, "overlap->done", size_t{overlap.zones} * overlap.blocks);
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

void LlHandle::expect_no_overlap() const {
    require(overlap_.memory == nullptr && overlap_.done == nullptr, ncclInvalidUsage,
            "crossdockHandleSetOverlap applies to the handle, allowed for elastic operations: none (NULL)");
}

}  // namespace crossdock
