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
    Operation operation;
    const bool runs = begin_operation(ctx, c, operation);
    RowStage stage(ctx,
                   ctx.shared_memory() + shared.stages + static_cast<uint32_t>(ctx.warp_idx()) * shared.stage_bytes);
    if (runs && (c.halves & kSendHalf) != 0) send_tokens(ctx, args, shared, operation, stage);
    if (runs && receives(c)) {
        ctx.block_sync();  // both halves use the same shared memory
        receive_tokens(ctx, args, shared, operation, stage, {ctx.block_idx(), ctx.num_blocks()});
    }
    end_operation(ctx, c, operation, runs, [&] { receive_tokens(ctx, args, shared, operation, stage, {0, 1}); });
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
