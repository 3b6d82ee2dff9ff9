// SPDX-License-Identifier: Apache-2.0
// Low-latency dispatch: one kernel, both halves or one of them. contract: nccl_ep.h, ncclEpDispatch; protocol:
// docs/protocol.md.
#pragma once

#include "kernels/ll/dispatch_receive.h"

namespace crossdock {
inline namespace CROSSDOCK_WORLD {

CROSSDOCK_DEVICE void ll_dispatch(const Ctx& ctx, const LlDispatchArgs& args) {
    const LlCommon& c = args.common;
    const LlDispatchShared shared = LlDispatchShared::of(args);
    init_stages(ctx, args, shared);
    ctx.wait_for_previous_kernels();
    if ((c.halves & kSendHalf) != 0) prepare_send(ctx, args, shared);
    load_head(ctx, c);
    ctx.block_sync();
    Operation operation;
    const bool runs = read_head(ctx, c, operation);
    uint32_t round = 0;  // loads of this warp's receive stage
    if (runs && (c.halves & kSendHalf) != 0) send_tokens(ctx, args, shared, operation);
    if (runs && receives(c)) {
        const int warps = static_cast<int>(c.receive_warps);
        if (ctx.warp_idx() >= ctx.num_warps() - warps) {
            receive_tokens(ctx, args, shared, operation, {ctx.block_idx(), ctx.num_blocks(), warps}, round);
        }
    }
    end_operation(ctx, c, operation, runs,
                  [&] { receive_tokens(ctx, args, shared, operation, {0, 1, ctx.num_warps()}, round); });
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
