// SPDX-License-Identifier: Apache-2.0
// A dispatch's words for experts that start while rows arrive: what low latency and high throughput have in common.
// Where the words are: crossdock/overlap.hpp; contract: crossdock.h, crossdockHandleSetOverlap.
#pragma once

#include "crossdock/overlap.hpp"
#include "device/context.h"

namespace crossdock {
namespace {

// What a dispatch publishes in the turn that it is.
class PublishedTurn {
  public:
    CROSSDOCK_DEVICE PublishedTurn(uint32_t* memory, OverlapLayout layout) : memory_(memory), layout_(layout) {}
    // After earlier kernels have ended.
    CROSSDOCK_DEVICE void begin(const Ctx& ctx) {
        turn_ = ctx.load_relaxed_device(memory_ + OverlapLayout::kDispatches);
    }

    // Clears what the next turn uses, one thread of `threads`. All users of the turn before have ended.
    CROSSDOCK_DEVICE void clear_next(uint64_t thread, uint64_t threads) const {
        uint32_t* words = memory_ + layout_.half(turn_ + 1);
        CROSSDOCK_ROLLED
        for (uint64_t i = thread; i < layout_.half_words(); i += threads) words[i] = 0;
    }
    // One thread per zone.
    CROSSDOCK_DEVICE void publish_count(const Ctx& ctx, uint32_t zone, uint32_t rows) const {
        ctx.store_relaxed_device(memory_ + layout_.count(turn_, zone), rows + 1);
    }
    // A part of a block is in place. Whose part completes the whole publishes the block's rows.
    CROSSDOCK_DEVICE void add(const Ctx& ctx, uint32_t zone, uint32_t block, uint32_t part, uint32_t whole,
                              uint32_t rows) const {
        uint32_t* arrived = memory_ + layout_.arrived(turn_, zone, block);
        if (ctx.add_acq_rel_device(arrived, part) + part == whole)
            ctx.add_acq_rel_device(memory_ + layout_.ready(turn_, zone, block), rows);
    }
    // One thread of each of the grid's blocks, whose threads have all ended with the words above.
    CROSSDOCK_DEVICE void finish(const Ctx& ctx, uint32_t num_blocks) const {
        uint32_t* finishing = memory_ + OverlapLayout::kFinishing;
        if (ctx.add_acq_rel_device(finishing, 1) + 1 != num_blocks) return;
        ctx.store_relaxed_device(finishing, 0);
        ctx.add_acq_rel_device(memory_ + OverlapLayout::kDispatches, 1);
    }

  private:
    uint32_t* memory_;
    OverlapLayout layout_;
    uint32_t turn_ = 0;
};

}  // namespace
}  // namespace crossdock
