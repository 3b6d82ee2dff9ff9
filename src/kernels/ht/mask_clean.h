// SPDX-License-Identifier: Apache-2.0
// Re-admits ranks to a high-throughput group. One block.
#pragma once

#include "kernels/ht/arguments.h"
#include "kernels/mask_exchange.h"

namespace crossdock {

struct HtMaskCleanArgs {
    MaskExchange exchange;
    HtState* state;
};

namespace {

CROSSDOCK_DEVICE void ht_mask_clean(const Ctx& ctx, const HtMaskCleanArgs& args) {
    ctx.wait_for_previous_kernels();
    const uint64_t epoch = agree_on_epoch(ctx, args.exchange, args.state->clock >> kHtTicketBits);
    if (thread_idx(ctx) == 0) {
        const uint64_t heartbeats = args.state->heartbeats;
        *args.state = HtState{};
        args.state->heartbeats = heartbeats;
        ctx.exchange_release_device(&args.state->clock, (epoch + 1) << kHtTicketBits);
    }
}

}  // namespace
}  // namespace crossdock
