// SPDX-License-Identifier: Apache-2.0
// crossdockHandleSetOverlap: what both modes check.
#pragma once

#include "core/tensor.h"
#include "crossdock.h"
#include "kernels/row_blocks.h"

namespace crossdock {

// Without memory. slots: the rows that a zone has room for.
RowBlocks row_blocks(unsigned int block_rows, uint32_t zones, uint32_t slots);
// That memory needs.
size_t overlap_words(const RowBlocks& blocks);

Tensor read_overlap_words(Communicator& communicator, const ncclEpTensor_t* caller, const char* name, size_t least);
// overlap->memory, checked.
uint32_t* read_overlap_memory(Communicator& communicator, const crossdockOverlap_t& overlap, const RowBlocks& blocks,
                              bool has_masks);
// InvalidUsage if an elastic operation's handle has counters.
void expect_no_overlap(bool has_counters);

}  // namespace crossdock
