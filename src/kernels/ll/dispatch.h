// SPDX-License-Identifier: Apache-2.0
// Low-latency dispatch: one kernel, both halves or one of them. contract: nccl_ep.h, ncclEpDispatch; protocol:
// docs/protocol.md.
#pragma once

#include "kernels/ll/dispatch_receive.h"

namespace crossdock {
inline namespace CROSSDOCK_WORLD {

CROSSDOCK_DEVICE void ll_dispatch(const Ctx& ctx, const LlDispatchArgs& args) {
    const LlCommon& c = args.common;
    const LlDispatchShared& shared = args.shared;
    ctx.mark(Step::kDispatchBegin);
    init_stages(ctx, args, shared);
    clear_counts(ctx, c, routing_counts(ctx, shared));
    ctx.wait_for_previous_kernels();
    if ((c.halves & kSendHalf) != 0) load_first_batch(ctx, args, shared);
    ctx.block_sync();
    load_head(ctx, c);
    if ((c.halves & kSendHalf) != 0) prepare_send(ctx, args, shared);
    ctx.block_sync();
    Operation operation;
    const bool runs = read_head(ctx, c, operation);
    ctx.mark(Step::kDispatchHead);
    uint32_t round = 0;  // loads of this warp's receive stage
    if (runs && (c.halves & kSendHalf) != 0) send_tokens(ctx, args, shared, operation);
    receive_for_good(ctx, c, operation, runs, static_cast<int>(c.crew.receive_warps), [&](const Share& share) {
        receive_tokens(ctx, args, operation, share, round);
    });
    ctx.mark(Step::kDispatchEnd);
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
