// SPDX-License-Identifier: Apache-2.0
// The counters between a layer's operations and its experts (crossdockHandleSetOverlap).
#pragma once

#include "conformance/support/tensors.h"
#include "crossdock/overlap.hpp"
#include "reference/problem.h"

namespace crossdock::testing {

class Overlap {
  public:
    static constexpr uint32_t kDoneValue = 3;

    // Applies to the handle from now on. Combines of low latency wait, unless done_value is 0.
    Overlap(RankContext& context, cudaStream_t stream, ncclEpHandle_t handle, const Problem& problem,
            uint32_t block_rows, uint32_t done_value = kDoneValue);

    // The kernel's side, of the same words.
    OverlapConsumer consumer() const;
    uint32_t zones() const { return layout_.zones; }
    uint32_t block_rows() const { return block_rows_; }

    // After a dispatch: the words tell of its rows, of each zone so many, and of nothing else.
    void check(const std::vector<uint32_t>& rows_of_zones) const;
    // After a dispatch: the experts have computed all blocks.
    void mark_done();

  private:
    std::vector<uint32_t> read() const;
    uint32_t latest_turn(const std::vector<uint32_t>& words) const { return words[OverlapLayout::kDispatches] - 1; }

    RankContext& context_;
    uint32_t block_rows_;
    uint32_t slots_;
    OverlapLayout layout_;
    std::unique_ptr<Buffer> memory_;
};

}  // namespace crossdock::testing
