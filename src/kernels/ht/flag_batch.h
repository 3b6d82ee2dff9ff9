// SPDX-License-Identifier: Apache-2.0
// High throughput: how packets are announced.
#pragma once

#include "kernels/ht/operation.h"

namespace crossdock {
namespace {

// Flags of packets, raised some at a time: what it costs to know that rows have landed is paid once for all of them.
// Every lane has its own packets. Must be called by the full warp.
class FlagBatch {
  public:
    CROSSDOCK_DEVICE FlagBatch(const Ctx& ctx, const HtShared& shared)
        : packets_(reinterpret_cast<uint64_t*>(ctx.shared_memory() + shared.unflagged) +
                   static_cast<uint32_t>(ctx.warp_idx()) * kFlagBatch * kLanes + static_cast<uint32_t>(ctx.lane())) {}

    // The lane's latest group of stores is that packet's. target: of dispatch the receiver, of combine the source rank.
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
