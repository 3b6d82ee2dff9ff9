// SPDX-License-Identifier: Apache-2.0
// What cleaning masks is in both modes: everybody who comes agrees on the next operation's epoch, then nothing of the
// past is waited for any more. One block.
#pragma once

#include "device/peer_map.h"
#include "device/wait.h"
#include "kernels/geometry.h"

namespace crossdock {

struct MaskExchange {
    PeerMap peers;            // the ranks' arenas
    uint64_t barrier_offset;  // in each: u64 [2][ranks]
    uint32_t num_ranks;
    int rank;
    WaitScope scope;
    uint64_t count;  // of this group's cleans, modulo 2^24: the same on every rank that takes part
};

inline namespace CROSSDOCK_WORLD {

CROSSDOCK_DEVICE uint64_t* barrier_word(const MaskExchange& exchange, int owner, int phase, int writer) {
    return reinterpret_cast<uint64_t*>(exchange.peers.at(owner, exchange.barrier_offset)) +
           static_cast<uint64_t>(phase) * exchange.num_ranks + static_cast<uint64_t>(writer);
}

// Everybody tells everybody a number and takes the largest that came. A rank that does not come in time is left out.
CROSSDOCK_DEVICE void exchange_largest(const Ctx& ctx, const MaskExchange& exchange, const WaitScope& scope,
                                       const Operation& operation, int phase, uint64_t* largest) {
    const uint64_t own = *largest;
    const int num_ranks = static_cast<int>(exchange.num_ranks);
    ctx.block_sync();
    CROSSDOCK_ROLLED
    for (int peer = thread_idx(ctx); peer < num_ranks; peer += num_threads(ctx)) {
        ctx.store_release_system(barrier_word(exchange, peer, phase, exchange.rank), pack_word(own, exchange.count));
    }
    CROSSDOCK_ROLLED
    for (int peer = ctx.warp_idx(); peer < num_ranks; peer += ctx.num_warps()) {
        if (!is_leader(ctx)) continue;
        const uint64_t* word = barrier_word(exchange, exchange.rank, phase, peer);
        uint64_t seen = 0;
        const bool came = wait_until(
            ctx, scope, operation, WaitStep::kBarrier, peer, exchange.count,
            [&] {
                seen = ctx.load_acquire_system(word);
                return word_payload(seen);
            },
            [&](uint64_t count) { return count == exchange.count; });
        if (came) ctx.max_shared(largest, word_epoch(seen));
    }
    ctx.block_sync();
}

CROSSDOCK_DEVICE void unmask_all(const Ctx& ctx, const MaskExchange& exchange) {
    CROSSDOCK_ROLLED
    for (uint32_t peer = static_cast<uint32_t>(thread_idx(ctx)); peer < exchange.num_ranks;
         peer += static_cast<uint32_t>(num_threads(ctx))) {
        ctx.store_relaxed_device(exchange.scope.mask + peer, 1);
    }
}

// The largest of the ranks' epochs. All are active before and after: masked ranks are waited for, too, since they may
// be back. Uses 8 bytes of shared memory.
CROSSDOCK_DEVICE uint64_t agree_on_epoch(const Ctx& ctx, const MaskExchange& exchange, uint64_t own_epoch) {
    uint64_t* largest = reinterpret_cast<uint64_t*>(ctx.shared_memory());
    Operation operation;
    operation.start_ns = ctx.now_ns();
    operation.epoch = own_epoch;
    if (thread_idx(ctx) == 0) {
        *largest = own_epoch;
        ctx.note_unread_slots_allowed();
    }
    unmask_all(ctx, exchange);
    ctx.block_sync();
    // Twice: in the first round ranks may have missed each other's latest, in the second everybody repeats what it has
    // heard. Whoever came late to the first round has waited later for those that did not come.
    exchange_largest(ctx, exchange, exchange.scope, operation, 0, largest);
    WaitScope longer = exchange.scope;
    longer.timeout_ns *= 2;
    operation.start_ns = ctx.now_ns();
    exchange_largest(ctx, exchange, longer, operation, 1, largest);
    unmask_all(ctx, exchange);
    return *largest;
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
