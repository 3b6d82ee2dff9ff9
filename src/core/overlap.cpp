// SPDX-License-Identifier: Apache-2.0
#include "core/overlap.h"

#include <algorithm>

#include "core/error.h"
#include "crossdock/overlap.hpp"

namespace crossdock {

RowBlocks row_blocks(unsigned int block_rows, uint32_t zones, uint32_t slots) {
    constexpr uint32_t kMostBlockRows = 1u << 20;  // a block's word counts 1024 for each row
    require(block_rows > 0, ncclInvalidArgument, "block_rows is 0, allowed: 1 and more");
    RowBlocks blocks{};
    blocks.zones = zones;
    blocks.slots = std::max(slots, 1u);
    blocks.block_rows = std::min(block_rows, blocks.slots);
    require(blocks.block_rows <= kMostBlockRows, ncclInvalidArgument, "block_rows is {}, allowed: at most {}",
            block_rows, kMostBlockRows);
    blocks.blocks = OverlapLayout::of(zones, blocks.slots, blocks.block_rows).blocks;
    return blocks;
}

size_t overlap_words(const RowBlocks& blocks) {
    return OverlapLayout{blocks.zones, blocks.blocks}.bytes() / sizeof(uint32_t);
}

Tensor read_overlap_words(Communicator& communicator, const ncclEpTensor_t* caller, const char* name, size_t least) {
    const Tensor words = read_tensor(communicator, caller, name);
    expect_dtype(words, {ncclInt32, ncclUint32});
    require(words.num_elements() >= least, ncclInvalidArgument, "{} has {} elements, expected at least {}", name,
            words.num_elements(), least);
    return words;
}

uint32_t* read_overlap_memory(Communicator& communicator, const crossdockOverlap_t& overlap, const RowBlocks& blocks,
                              bool has_masks) {
    require(!has_masks, ncclInvalidUsage,
            "the group has masks (enable_mask, in HT ht_masks), allowed with overlap->memory: groups without");
    return reinterpret_cast<uint32_t*>(
        read_overlap_words(communicator, overlap.memory, "overlap->memory", overlap_words(blocks)).data);
}

void expect_no_overlap(bool has_counters) {
    require(!has_counters, ncclInvalidUsage,
            "crossdockHandleSetOverlap applies to the handle, allowed for elastic operations: none (NULL)");
}

}  // namespace crossdock
