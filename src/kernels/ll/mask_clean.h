// SPDX-License-Identifier: Apache-2.0
// Re-admits ranks: everybody who comes agrees on the next operation's epoch, then nothing of the past is waited for any
// more. One block.
#pragma once

#include "kernels/ll/operation.h"

namespace crossdock {

struct LlMaskCleanArgs {
    LlCommon common;
    uint64_t count;  // of this group's cleans, modulo 2^24: the same on every rank that takes part
};

inline namespace CROSSDOCK_WORLD {

CROSSDOCK_DEVICE uint64_t* barrier_word(const LlCommon& c, int owner, int phase, int writer) {
    return reinterpret_cast<uint64_t*>(c.peers.at(owner, c.arena.barrier_offset())) +
           static_cast<uint64_t>(phase) * c.arena.num_ranks + static_cast<uint64_t>(writer);
}

// Everybody tells everybody a number and takes the largest that came. A rank that does not come in time is left out.
CROSSDOCK_DEVICE void exchange_largest(const Ctx& ctx, const LlMaskCleanArgs& args, const Operation& operation,
                                       int phase, uint64_t* largest) {
    const LlCommon& c = args.common;
    const uint64_t own = *largest;
    ctx.block_sync();
    CROSSDOCK_ROLLED
    for (int peer = thread_idx(ctx); peer < static_cast<int>(c.arena.num_ranks); peer += num_threads(ctx)) {
        ctx.store_release_system(barrier_word(c, peer, phase, c.rank), pack_word(own, args.count));
    }
    CROSSDOCK_ROLLED
    for (int peer = ctx.warp_idx(); peer < static_cast<int>(c.arena.num_ranks); peer += ctx.num_warps()) {
        if (!is_leader(ctx)) continue;
        const uint64_t* word = barrier_word(c, c.rank, phase, peer);
        uint64_t seen = 0;
        const bool came = wait_until(
            ctx, c.scope, operation, WaitStep::kBarrier, peer, args.count,
            [&] {
                seen = ctx.load_acquire_system(word);
                return word_payload(seen);
            },
            [&](uint64_t count) { return count == args.count; });
        if (came) ctx.max_shared(largest, word_epoch(seen));
    }
    ctx.block_sync();
}

CROSSDOCK_DEVICE void ll_mask_clean(const Ctx& ctx, const LlMaskCleanArgs& args) {
    const LlCommon& c = args.common;
    uint64_t* largest = reinterpret_cast<uint64_t*>(ctx.shared_memory());
    ctx.wait_for_previous_kernels();
    Operation operation;
    operation.start_ns = ctx.now_ns();
    if (thread_idx(ctx) == 0) {
        *largest = LlClock::of(c.state->clock).epoch;
        operation.epoch = *largest;
        ctx.note_unread_slots_allowed();
    }
    // Masked ranks are waited for, too: they may be back.
    CROSSDOCK_ROLLED
    for (uint32_t peer = static_cast<uint32_t>(thread_idx(ctx)); peer < c.arena.num_ranks;
         peer += static_cast<uint32_t>(num_threads(ctx))) {
        ctx.store_relaxed_device(c.scope.mask + peer, 1);
    }
    ctx.block_sync();
    // Twice: in the first round ranks may have missed each other's latest, in the second everybody repeats what it has
    // heard.
    exchange_largest(ctx, args, operation, 0, largest);
    exchange_largest(ctx, args, operation, 1, largest);

    CROSSDOCK_ROLLED
    for (uint32_t i = static_cast<uint32_t>(thread_idx(ctx)); i < c.arena.num_ranks;
         i += static_cast<uint32_t>(num_threads(ctx))) {
        ctx.store_relaxed_device(c.scope.mask + i, 1);
    }
    if (thread_idx(ctx) == 0) {
        *c.state = LlArenaState{};
        ctx.exchange_release_device(&c.state->clock, LlClock{*largest + 1, 0, 0, 0}.word());
    }
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
