// SPDX-License-Identifier: Apache-2.0
// Mask cleans in both modes: all participating ranks agree on the next operation's epoch; then nothing of earlier
// operations is awaited. One block.
#pragma once

#include "device/peer_map.h"
#include "kernels/geometry.h"
#include "kernels/remote.h"
#include "kernels/wait.h"
#include "kernels/wait_steps.h"

namespace crossdock {

struct MaskExchange {
    PeerMap peers;            // the ranks' arenas
    uint64_t barrier_offset;  // in each: u64 [2][ranks]
    uint32_t num_ranks;
    uint32_t rank;
    WaitScope scope;
    uint64_t count;  // of this group's cleans, modulo 2^24: the same on every participating rank
    Reach reach;
};

// A later one would soon be the last. No group runs that many operations between cleans, so a larger number is invalid,
// and its sender is left out.
inline constexpr uint64_t kLastProposedEpoch = kLastEpoch / 2 + 1;

namespace {

CROSSDOCK_DEVICE uint64_t* barrier_word(const MaskExchange& exchange, uint32_t owner, uint32_t phase, uint32_t writer) {
    return reinterpret_cast<uint64_t*>(exchange.peers.at(owner, exchange.barrier_offset)) +
           uint64_t{phase} * exchange.num_ranks + writer;
}

// The same for GIN peers, as an offset in every arena. Not the words of the previous clean, whose puts may still be in
// flight.
CROSSDOCK_DEVICE uint64_t remote_barrier(const MaskExchange& exchange, uint32_t phase, uint32_t writer) {
    const uint64_t words = exchange.count % 2 * 2 + phase;
    return exchange.reach.words.barrier.offset + 8 * (words * exchange.num_ranks + writer);
}

// The value of a GIN peer's signal once its number of this phase has arrived.
CROSSDOCK_DEVICE uint64_t barrier_signal(const MaskExchange& exchange, uint32_t phase) {
    return 2 * exchange.count + phase;
}

CROSSDOCK_DEVICE void tell_number(const Ctx& ctx, const MaskExchange& exchange, uint32_t phase, uint32_t peer,
                                  uint64_t word) {
    if (!is_remote(exchange.reach, peer)) {
        ctx.store_release_system(barrier_word(exchange, peer, phase, exchange.rank), word);
        return;
    }
    put_value_and_raise(ctx, exchange.reach, peer, remote_barrier(exchange, phase, exchange.rank), word,
                        raise_of(exchange.reach, Signal::kBarrier, peer, barrier_signal(exchange, phase)));
}

// 0 if it has not arrived.
CROSSDOCK_DEVICE uint64_t number_told(const Ctx& ctx, const MaskExchange& exchange, uint32_t phase, uint32_t peer) {
    if (!is_remote(exchange.reach, peer)) {
        return ctx.load_acquire_system(barrier_word(exchange, exchange.rank, phase, peer));
    }
    const uint64_t* signal = signal_word(exchange.reach, Signal::kBarrier, peer);
    if (ctx.load_acquire_system(signal) < barrier_signal(exchange, phase)) return 0;
    return ctx.load_acquire_system(
        reinterpret_cast<const uint64_t*>(exchange.reach.network.local + remote_barrier(exchange, phase, peer)));
}

// All ranks exchange a number and take the largest one, without ranks that time out.
CROSSDOCK_DEVICE void exchange_largest(const Ctx& ctx, const MaskExchange& exchange, const WaitScope& scope,
                                       const Operation& operation, uint32_t phase, uint64_t* largest) {
    const uint64_t own = *largest;
    const uint32_t num_ranks = exchange.num_ranks;
    ctx.block_sync();
    CROSSDOCK_ROLLED
    for (uint32_t peer = thread_idx(ctx); peer < num_ranks; peer += num_threads(ctx)) {
        tell_number(ctx, exchange, phase, peer, pack_word(own, exchange.count));
    }
    CROSSDOCK_ROLLED
    for (uint32_t peer = ctx.warp_idx(); peer < num_ranks; peer += ctx.num_warps()) {
        if (!is_leader(ctx)) continue;
        uint64_t seen = 0;
        const bool came = wait_until(
            ctx, scope, operation, WaitStep::kBarrier, peer, exchange.count,
            [&] {
                seen = number_told(ctx, exchange, phase, peer);
                return word_payload(seen);
            },
            [&](uint64_t count) { return count == exchange.count; });
        if (came && word_epoch(seen) <= kLastProposedEpoch) ctx.max_shared(largest, word_epoch(seen));
    }
    ctx.block_sync();
}

CROSSDOCK_DEVICE void unmask_all(const Ctx& ctx, const MaskExchange& exchange) {
    CROSSDOCK_ROLLED
    for (uint32_t peer = thread_idx(ctx); peer < exchange.num_ranks; peer += num_threads(ctx)) {
        ctx.store_relaxed_device(exchange.scope.mask + peer, 1);
    }
}

// Returns the largest of the ranks' epochs. All ranks are active before and after: masked ranks are awaited as well,
// since they may have recovered. Uses 8 bytes of shared memory.
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
    // Two rounds: in the first, ranks may miss each other's latest number; in the second each rank repeats the largest
    // that it has seen. The second timeout is longer because late ranks wait longer in the first round for lost ones.
    exchange_largest(ctx, exchange, exchange.scope, operation, 0, largest);
    WaitScope longer = exchange.scope;
    longer.timeout_ns *= 2;
    operation.start_ns = ctx.now_ns();
    exchange_largest(ctx, exchange, longer, operation, 1, largest);
    unmask_all(ctx, exchange);
    return *largest;
}

}  // namespace
}  // namespace crossdock
