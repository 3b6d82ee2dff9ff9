// SPDX-License-Identifier: Apache-2.0
// With masks, a peer that is lost while blocks receive: the receive half runs again.
#pragma once

#include "kernels/ll/peers.h"

namespace crossdock {
namespace {

CROSSDOCK_DEVICE void note_mask(const Ctx& ctx, const auto& c, uint32_t peer) {
    if (!is_active(ctx, c.scope, peer)) entered_so_far(ctx)[peer] = kMasked;
}

// With masks. Returns true if the receive half must run again. If a peer was lost during it, blocks may have used
// different masks; the block that finishes last then repeats the whole receive half alone, with the latest masks. That
// is so if any block began when fewer losses had been counted: the sum of what all have counted tells.
CROSSDOCK_DEVICE_RARE bool must_receive_again(const Ctx& ctx, const auto& c) {
    constexpr uint32_t kCountBits = 12;  // of blocks, more than a GPU runs; above them the sum, which may wrap around
    LlBlockHead& head = block_head(ctx);
    const auto num_blocks = ctx.num_blocks();
    const bool is_first_thread = thread_idx(ctx) == 0;
    const bool is_first_run = head.is_last == 0;
    ctx.block_sync();
    if (is_first_run) {
        if (is_first_thread) {
            const uint32_t own = 1 + (head.losses << kCountBits);
            const uint32_t sum = ctx.add_acq_rel_device(&c.state->blocks_done, own) + own;
            head.is_last = sum % (1u << kCountBits) == num_blocks ? 1 : 0;
            head.verdict = sum >> kCountBits;
        }
        ctx.block_sync();
        if (head.is_last == 0) return false;
    }
    if (is_first_thread) {
        const uint32_t losses = ctx.load_acquire_device(&c.scope.control->losses);
        const uint32_t missed = is_first_run ? num_blocks * losses - head.verdict : losses - head.losses;
        if (is_first_run) c.state->blocks_done = 0;
        head.verdict = missed << kCountBits != 0 ? 1 : 0;
        head.losses = losses;
    }
    ctx.block_sync();
    if (head.verdict == 0) return false;
    for_threads(ctx, c.arena.num_ranks, [&](uint32_t peer) { note_mask(ctx, c, peer); });
    ctx.block_sync();
    return true;
}

}  // namespace
}  // namespace crossdock
