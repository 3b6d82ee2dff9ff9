// SPDX-License-Identifier: Apache-2.0
// High throughput, rows in windows: the end of an operation whose ranks write or read each other's tensors.
#pragma once

#include "kernels/ht/operation.h"

namespace crossdock {
namespace {

CROSSDOCK_DEVICE uint64_t* done_word(const Ctx& ctx, const HtCommon& c, uint32_t owner, uint32_t writer) {
    return c.peers.at(owner, c.offsets.done) + (uint64_t{writer} * c.arena.channels + ctx.block_idx());
}

// Of rows that are written into windows. The whole block, after its warps' last stores (not all, if the group has
// failed). Afterwards all rows of this channel are in their slots, here and at the peers.
CROSSDOCK_DEVICE void exchange_done(const Ctx& ctx, const HtCommon& c, const Operation& operation,
                                    const uint32_t* states) {
    ctx.block_sync();
    CROSSDOCK_ROLLED
    for (uint32_t peer = first_of_team(c) + thread_idx(ctx); peer < end_of_team(c); peer += num_threads(ctx)) {
        if (states[peer] == kDirect && !has_failed(ctx, c.scope))
            ctx.store_release_system(done_word(ctx, c, peer, c.rank), operation.epoch);
    }
    CROSSDOCK_ROLLED
    for (uint32_t peer = first_of_team(c) + thread_idx(ctx); peer < end_of_team(c); peer += num_threads(ctx)) {
        if (states[peer] != kDirect || !is_active(ctx, c.scope, peer)) continue;
        const uint64_t* done = done_word(ctx, c, c.rank, peer);
        wait_for(
            ctx, c, operation, WaitStep::kRow, peer, operation.epoch, [&] { return ctx.load_acquire_system(done); },
            [&](uint64_t epoch) { return epoch >= operation.epoch; });
    }
}

CROSSDOCK_DEVICE bool is_in_window(uint32_t state) { return state == kDirect || state == kReadable; }

// Rows in windows must not be overwritten while peers still read them: each rank says when it has finished. One block,
// after all others.
CROSSDOCK_DEVICE void wait_until_all_have_read(const Ctx& ctx, const HtCommon& c, const Operation& operation,
                                               const uint32_t* states) {
    const auto word = [&](uint32_t owner, uint32_t writer) { return c.peers.at(owner, c.offsets.finished) + writer; };
    CROSSDOCK_ROLLED
    for (uint32_t peer = first_of_team(c) + thread_idx(ctx); peer < end_of_team(c); peer += num_threads(ctx)) {
        if (is_in_window(states[peer])) ctx.store_entered_system(word(peer, c.rank), operation.epoch);
    }
    CROSSDOCK_ROLLED
    for (uint32_t peer = first_of_team(c) + thread_idx(ctx); peer < end_of_team(c); peer += num_threads(ctx)) {
        if (!is_in_window(states[peer]) || !is_active(ctx, c.scope, peer)) continue;
        const uint64_t* finished = word(c.rank, peer);
        wait_for(
            ctx, c, operation, WaitStep::kFinished, peer, operation.epoch,
            [&] { return ctx.load_acquire_system(finished); },
            [&](uint64_t epoch) { return epoch >= operation.epoch; });
    }
}

}  // namespace
}  // namespace crossdock
