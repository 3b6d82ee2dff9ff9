// SPDX-License-Identifier: Apache-2.0
// Re-admits ranks to a low-latency group. One block.
#pragma once

#include "kernels/ll/arguments.h"
#include "kernels/mask_exchange.h"

namespace crossdock {

struct LlMaskCleanArgs {
    MaskExchange exchange;
    LlArenaState* state;
};

namespace {

CROSSDOCK_DEVICE void ll_mask_clean(const Ctx& ctx, const LlMaskCleanArgs& args) {
    ctx.wait_for_previous_kernels();
    const uint64_t epoch = agree_on_epoch(ctx, args.exchange, LlClock::of(args.state->clock).epoch);
    if (thread_idx(ctx) == 0) {
        *args.state = LlArenaState{};
        ctx.exchange_release_device(&args.state->clock, LlClock{epoch + 1, 0, 0}.word());
    }
}

}  // namespace
}  // namespace crossdock
