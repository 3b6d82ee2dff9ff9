// SPDX-License-Identifier: Apache-2.0
// What low-latency operations do for peers outside the load/store domain. Rows, headers and counts are put where a peer
// of the domain would have stored them; a signal behind them says that all of the operation is there. So receivers wait
// for one word a source, and then find what they would have found in their own domain. A signal may also be of a later
// operation, because the peer has left this one out, having lost this rank; so a word beside the data names its own.
#pragma once

#include "kernels/ll/operation.h"
#include "kernels/remote.h"

namespace crossdock {
inline namespace CROSSDOCK_VARIANT {

CROSSDOCK_DEVICE std::byte* in_outbox(const auto& c, uint64_t offset) { return c.reach.network.local + offset; }
CROSSDOCK_DEVICE uint64_t outbox_counts(const auto& c, int peer) {
    return c.outbox.counts + static_cast<uint64_t>(peer) * c.offsets.count_stride;
}
CROSSDOCK_DEVICE uint64_t outbox_header(const auto& c, int peer, uint32_t i) {
    return c.outbox.headers + uint64_t{slot_of(c, peer, i)} * c.offsets.header_stride;
}
CROSSDOCK_DEVICE uint64_t outbox_row(const auto& c, uint32_t row) {
    return c.outbox.rows + uint64_t{row} * c.offsets.row_stride;
}

// Where things lie in every rank's arena.
CROSSDOCK_DEVICE uint64_t offset_of_counts(const auto& c, const Operation& operation, int source) {
    return operation.base + c.offsets.counts + static_cast<uint64_t>(source) * c.offsets.count_stride;
}
CROSSDOCK_DEVICE uint64_t offset_of_header(const auto& c, const Operation& operation, uint32_t slot) {
    return operation.base + c.offsets.headers + uint64_t{slot} * c.offsets.header_stride;
}
CROSSDOCK_DEVICE uint64_t offset_of_weights(const auto& c, const Operation& operation, int source) {
    return operation.base + c.offsets.weights +
           static_cast<uint64_t>(source) * c.arena.max_tokens * c.offsets.weight_stride;
}
CROSSDOCK_DEVICE uint64_t offset_of_flag(const auto& c, const Operation& operation, uint32_t row) {
    return operation.base + c.offsets.row_flags + uint64_t{8} * row;
}
CROSSDOCK_DEVICE uint64_t offset_of_row(const auto& c, const Operation& operation, uint32_t row) {
    return operation.base + c.offsets.rows + uint64_t{row} * c.offsets.row_stride;
}

// Before the outbox is written: the network has read what earlier operations have put.
CROSSDOCK_DEVICE void empty_outbox(const Ctx& ctx, const auto& c) {
    if constexpr (!kHasGinPeers) return;
    if (thread_idx(ctx) == 0) flush_network(ctx, c.reach.network);
}

CROSSDOCK_DEVICE bool wait_far(const Ctx& ctx, const auto& c, const Operation& operation, WaitStep step, Signal signal,
                               int peer) {
    return wait_signal(ctx, c.scope, c.reach, operation, step, signal, peer, operation.epoch);
}

// The same for a whole warp.
CROSSDOCK_DEVICE bool wait_far_as_warp(const Ctx& ctx, const auto& c, const Operation& operation, WaitStep step,
                                       Signal signal, int peer) {
    const bool came =
        is_leader(ctx) && is_active(ctx, c.scope, peer) && wait_far(ctx, c, operation, step, signal, peer);
    return ctx.warp_broadcast(came ? 1u : 0u) != 0;
}

// True in all threads of one block: the one that is the last to have put what it puts. By all blocks.
CROSSDOCK_DEVICE bool is_last_to_put(const Ctx& ctx, const auto& c) {
    uint32_t* verdict = &ll_block_head(ctx)->verdict;
    ctx.block_sync();
    if (thread_idx(ctx) == 0) {
        ctx.fence_system();
        const uint32_t before = ctx.add_acq_rel_device(&c.state->blocks_put, 1);
        *verdict = before + 1 == static_cast<uint32_t>(ctx.num_blocks()) ? 1 : 0;
        if (*verdict != 0) c.state->blocks_put = 0;
    }
    ctx.block_sync();
    const bool is_last = *verdict != 0;
    ctx.block_sync();
    return is_last;
}

// Behind all that the blocks have put: tell(peer), by one thread a peer, puts what goes last and raises the signal.
template <typename Tell>
CROSSDOCK_DEVICE void tell_far_peers(const Ctx& ctx, const auto& c, const Operation& operation, Tell tell) {
    if constexpr (!kHasGinPeers) return;
    if (!is_last_to_put(ctx, c)) return;
    CROSSDOCK_ROLLED
    for (int peer = thread_idx(ctx); peer < static_cast<int>(c.arena.num_ranks); peer += num_threads(ctx)) {
        if (is_remote(c.reach, peer) && wait_credit(ctx, c, operation, peer)) tell(peer);
    }
    ctx.block_sync();
}

// A pending operation that is given up: what is still under way to this rank must arrive before its buffer is anybody's
// again, or it would arrive in the middle of a later operation. Who sends is known from the routing.
CROSSDOCK_DEVICE void await_stragglers(const Ctx& ctx, const auto& c, const Operation& operation) {
    if constexpr (!kHasGinPeers) return;
    if (ctx.block_idx() != 0 || ctx.warp_idx() != 0 || !is_leader(ctx)) return;
    if (c.scope.operation == OperationKind::kDispatch) {
        CROSSDOCK_ROLLED
        for (int peer = 0; peer < static_cast<int>(c.arena.num_ranks); ++peer) {
            if (is_remote(c.reach, peer)) wait_far(ctx, c, operation, WaitStep::kCounts, Signal::kData, peer);
        }
        return;
    }
    CROSSDOCK_ROLLED
    for (uint32_t i = 0; i < c.num_tokens * c.topk; ++i) {
        const int peer = rank_of_expert(c, expert_id(c, 0, i));
        if (peer >= 0 && is_remote(c.reach, peer)) wait_far(ctx, c, operation, WaitStep::kRow, Signal::kData, peer);
    }
}

}  // namespace CROSSDOCK_VARIANT
}  // namespace crossdock
