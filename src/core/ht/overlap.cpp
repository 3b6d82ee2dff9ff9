// SPDX-License-Identifier: Apache-2.0
// crossdockHandleSetOverlap: dispatches tell the experts' kernel which rows are in place.
#include "core/overlap.h"

#include <algorithm>

#include "core/error.h"
#include "core/ht/handle.h"

namespace crossdock {

RowBlocks HtHandle::overlap_blocks(unsigned int block_rows) const {
    require(
        is_expert_major(), ncclInvalidUsage,
        "the handle's layout is flat, allowed for crossdockHandleSetOverlap and crossdockOverlapWords in HT groups: "
        "expert-major");
    const GroupConfig& config = group_->config();
    const uint64_t all_tokens = uint64_t{config.num_ranks} * config.max_tokens;
    return row_blocks(block_rows, config.experts_per_rank(),
                      static_cast<uint32_t>(std::min<uint64_t>(all_tokens, budget())));
}

void HtHandle::set_overlap(const crossdockOverlap_t* caller) {
    group_->expect_working();
    if (caller == nullptr) {
        published_ = {};
        return;
    }
    RowBlocks blocks = overlap_blocks(caller->block_rows);
    require(caller->memory != nullptr, ncclInvalidArgument, "overlap->memory is NULL, expected for HT handles");
    require(caller->done == nullptr && caller->done_value == 0, ncclInvalidUsage,
            "overlap->done is {}, overlap->done_value is {}, allowed for HT handles: NULL, 0 (their combines wait for "
            "no counters)",
            caller->done == nullptr ? "NULL" : "set", caller->done_value);
    blocks.memory = read_overlap_memory(group_->communicator(), *caller, blocks, group_->config().masking);
    published_ = blocks;
}

}  // namespace crossdock
