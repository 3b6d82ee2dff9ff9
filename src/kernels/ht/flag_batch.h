// SPDX-License-Identifier: Apache-2.0
// High throughput: the flags of packets.
#pragma once

#include "kernels/ht/operation.h"

namespace crossdock {
namespace {

// Raises the flags of several packets together, so that the wait for landed rows is paid once. Every lane has its own
// packets. Must be called by the full warp.
class FlagBatch {
  public:
    CROSSDOCK_DEVICE FlagBatch(const Ctx& ctx, const HtShared& shared)
        : packets_(reinterpret_cast<uint64_t*>(ctx.shared_memory() + shared.unflagged) +
                   static_cast<uint32_t>(ctx.warp_idx()) * kFlagBatch * kLanes + static_cast<uint32_t>(ctx.lane())) {}

    // The packet of the lane's latest group of stores. target: the receiver (dispatch) or the source rank (combine).
    CROSSDOCK_DEVICE void add(int target, uint32_t packet) {
        packets_[num_++ * kLanes] = uint64_t{static_cast<uint32_t>(target)} << 32 | packet;
    }
    CROSSDOCK_DEVICE bool is_full() const { return num_ == kFlagBatch; }

    CROSSDOCK_DEVICE void flush(const Ctx& ctx, const HtCommon& c, const Operation& operation, uint32_t slots) {
        if (num_ > 0) {
            RowStage::wait_stores(ctx);
            ctx.fence_landed();
            CROSSDOCK_ROLLED
            for (uint32_t i = 0; i < num_; ++i) {
                const uint32_t packet = static_cast<uint32_t>(packets_[i * kLanes]);
                const int target = static_cast<int>(packets_[i * kLanes] >> 32);
                const Ring ring = Ring::of(c, c.offsets.rows, agent_of(c, target), lane_of(c, target, c.rank),
                                           static_cast<uint32_t>(ctx.block_idx()));
                ctx.store_entered_system(ring.flags + packet % slots, pack_word(operation.epoch, packet));
            }
            num_ = 0;
        }
        ctx.warp_sync();
    }

  private:
    uint64_t* packets_;
    uint32_t num_ = 0;
};

}  // namespace
}  // namespace crossdock
