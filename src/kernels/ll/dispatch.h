// SPDX-License-Identifier: Apache-2.0
// Low-latency dispatch: one kernel, both halves or one of them. contract: nccl_ep.h, ncclEpDispatch; protocol:
// docs/protocol.md.
#pragma once

#include "kernels/ll/dispatch_receive.h"

namespace crossdock {
inline namespace CROSSDOCK_VARIANT {

CROSSDOCK_DEVICE void ll_dispatch(const Ctx& ctx, const auto& args) {
    const auto& c = args.common;
    const LlDispatchShared& shared = args.shared;
    ctx.mark(Step::kDispatchBegin);
    init_stages(ctx, args, shared);
    clear_counts(ctx, c, routing_counts(ctx, shared));
    ctx.block_sync();
    const uint32_t ticket = load_early_head(ctx, c);
    ctx.wait_for_previous_kernels();
    ctx.mark(Step::kDispatchReady);
    const bool sends = (c.halves & kSendHalf) != 0;
    const TokenIds first_ids = sends ? load_first_ids(ctx, c) : TokenIds{};
    if (sends) load_first_batch(ctx, args, shared);
    ctx.mark(Step::kDispatchFetching);
    if (sends) load_first_plans(ctx, args, shared);
    load_head(ctx, c, c.expert_major ? 0 : args.direct);
    if (sends) empty_outbox(ctx, c);
    if (sends) prepare_send(ctx, args, shared, first_ids);
    ctx.block_sync();
    Operation operation;
    const bool runs = read_head(ctx, c, ticket, operation);
    ctx.mark(Step::kDispatchHead);
    uint32_t round = 0;  // loads of this warp's receive stage
    if (runs && sends) send_tokens(ctx, args, shared, operation);
    if (runs && sends) finish_puts(ctx, args, operation);
    if (runs && (c.halves & kCancel) != 0) await_stragglers(ctx, c, operation);
    if (!runs && sends) abandon_first_batch(ctx, args, shared);
    receive_for_good(ctx, c, operation, runs, static_cast<int>(c.crew.receive_warps),
                     [&](const WorkShare& share, bool) { receive_tokens(ctx, args, operation, share, round); });
    ctx.mark(Step::kDispatchEnd);
}

}  // namespace CROSSDOCK_VARIANT
}  // namespace crossdock
