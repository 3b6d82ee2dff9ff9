// SPDX-License-Identifier: Apache-2.0
// High-throughput dispatch: one kernel; the first warps of each block send, the others receive. contract: nccl_ep.h,
// ncclEpDispatch; protocol: docs/protocol.md.
#pragma once

#include "kernels/ht/dispatch_receive.h"

namespace crossdock {
inline namespace CROSSDOCK_WORLD {

CROSSDOCK_DEVICE void ht_dispatch(const Ctx& ctx, const HtDispatchArgs& args) {
    const HtCommon& c = args.common;
    init_stage(ctx, args.crew, args.shared);
    ctx.wait_for_previous_kernels();
    const Operation operation = begin_operation(ctx, c);
    wait_all_entered(ctx, c, operation, peer_states(ctx, args.shared));
    if (has_failed(ctx, c.scope)) return;
    if (ctx.block_idx() == 0) write_counters(ctx, c, args.counters);
    const uint32_t warp = static_cast<uint32_t>(ctx.warp_idx());
    if (warp < args.crew.producers) {
        send_tokens(ctx, args, operation);
        return;
    }
    const uint32_t receivers = args.crew.warps_per_block - args.crew.producers;
    receive_tokens(ctx, args, operation, warp - args.crew.producers, receivers);
    fill_gaps(
        ctx, args,
        (warp - args.crew.producers) * static_cast<uint32_t>(ctx.num_blocks()) + static_cast<uint32_t>(ctx.block_idx()),
        receivers * static_cast<uint32_t>(ctx.num_blocks()));
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
