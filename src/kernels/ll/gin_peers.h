// SPDX-License-Identifier: Apache-2.0
// GIN peers in LL operations. All rows for a peer are put together. So in groups of several LSA teams slots and cells
// have no gaps, and begin with what is said of their row (a header, or a cell's flag); one rank fills consecutive ones
// (ReturnCells). The last block to store its rows puts, since a put takes far longer than to store all rows. A signal
// after the last put means that all data of the operation has arrived, so a receiver waits for one word per source. The
// signal may belong to a later operation, if the peer skipped this one because it lost this rank; so a word outside the
// rows names the data's operation.
#pragma once

#include "kernels/ll/peers.h"
#include "kernels/remote.h"

namespace crossdock {
namespace {

// Offsets in the outbox, in bytes from the beginning of this rank's arena.
CROSSDOCK_DEVICE std::byte* in_outbox(const auto& c, uint64_t offset) { return c.reach.network.local + offset; }
CROSSDOCK_DEVICE uint64_t outbox_counts(const auto& c, uint32_t peer) {
    return c.outbox.counts.offset + uint64_t{peer} * c.offsets.count_stride;
}
// A slot or cell.
CROSSDOCK_DEVICE uint64_t outbox_row(const auto& op, uint32_t row) {
    return op.c.outbox.rows.offset + uint64_t{row} * op.row_stride();
}

// One thread of each block, before the outbox is written: returns when the network has read what earlier operations
// have put, or when the group has failed. announces: the thread that will put this operation's entry. It flushes before
// that, since a flush waits for everything that has been put. The others wait for this thread, in device memory.
CROSSDOCK_DEVICE void await_outbox(const Ctx& ctx, const auto& c, uint64_t epoch, bool announces) {
    if constexpr (!kHasGinPeers) return;
    if (announces) {
        flush_network(c.reach.network);
        ctx.exchange_release_device(&c.state->outbox_epoch, epoch);
        return;
    }
    const uint64_t deadline_ns = ctx.now_ns() + c.scope.timeout_ns;
    poll_until(
        ctx, [&] { return ctx.load_acquire_system(&c.state->outbox_epoch); },
        [&](uint64_t seen) { return seen >= epoch; },
        [&](uint64_t) {
            ctx.pause(deadline_ns);
            return !has_failed(ctx, c.scope);
        });
}

CROSSDOCK_DEVICE Raise raise_to_epoch(const auto& op, Signal signal, uint32_t peer) {
    return raise_of(op.c.reach, signal, peer, op.epoch);
}

CROSSDOCK_DEVICE bool wait_gin(const auto& op, WaitStep step, Signal signal, uint32_t peer) {
    return wait_signal(op.ctx, op.c.scope, op.c.reach, op, step, signal, peer, op.epoch);
}
// The same by a full warp.
CROSSDOCK_DEVICE bool wait_gin_as_warp(const auto& op, WaitStep step, Signal signal, uint32_t peer) {
    const bool came = is_leader(op.ctx) && is_active(op.ctx, op.c.scope, peer) && wait_gin(op, step, signal, peer);
    return op.ctx.warp_broadcast(came ? 1u : 0u) != 0;
}

// By all blocks. Returns true in all threads of the last block to come here.
CROSSDOCK_DEVICE bool is_last_to_put(const Ctx& ctx, const auto& c) {
    uint32_t* verdict = &block_head(ctx).verdict;
    ctx.block_sync();
    if (thread_idx(ctx) == 0) {
        ctx.fence_system();
        const uint32_t before = ctx.add_acq_rel_device(&c.state->blocks_put, 1);
        *verdict = before + 1 == ctx.num_blocks() ? 1 : 0;
        if (*verdict != 0) c.state->blocks_put = 0;
    }
    ctx.block_sync();
    const bool is_last = *verdict != 0;
    ctx.block_sync();
    return is_last;
}

// When all blocks have come here, one thread of the last one calls tell(peer) for each peer, which puts what all have
// stored in the outbox. Returns true in the last block.
template <typename Tell>
CROSSDOCK_DEVICE bool tell_gin_peers(const auto& op, Tell tell) {
    if constexpr (!kHasGinPeers) return false;
    if (!is_last_to_put(op.ctx, op.c)) return false;
    for_threads(op.ctx, op.c.arena.num_ranks, [&](uint32_t peer) {
        if (op.is_gin_peer(peer) && op.wait_credit(peer)) tell(peer);
    });
    op.ctx.block_sync();
    return true;
}

// The same where the outbox is used again: returns in all blocks when the network has read it. Returns false if the
// group has failed before that: some blocks may not come here then.
template <typename Tell>
CROSSDOCK_DEVICE bool tell_and_empty_outbox(const auto& op, Tell tell) {
    uint32_t* const emptied = &op.c.state->outboxes_emptied;
    uint32_t* const verdict = &block_head(op.ctx).verdict;
    const bool is_first_thread = thread_idx(op.ctx) == 0;
    const uint32_t before = is_first_thread ? op.ctx.load_acquire_device(emptied) : 0;
    const bool is_last = tell_gin_peers(op, tell);
    if (is_first_thread && is_last) {
        flush_network(op.c.reach.network);
        op.ctx.add_acq_rel_device(emptied, 1);
        *verdict = 1;
    } else if (is_first_thread) {
        const bool is_empty = poll_until(
            op.ctx, [&] { return op.ctx.load_acquire_device(emptied); }, [&](uint64_t seen) { return seen != before; },
            [&](uint64_t) {
                op.ctx.pause(op.start_ns + op.c.scope.timeout_ns);
                return !has_failed(op.ctx, op.c.scope);
            });
        *verdict = is_empty ? 1 : 0;
    }
    op.ctx.block_sync();
    const bool is_empty = *verdict != 0;
    op.ctx.block_sync();
    return is_empty;
}

// For a pending operation that is cancelled: data still in flight to this rank must arrive before its buffer is used
// again, or it would arrive during a later operation. The routing tells which ranks send.
CROSSDOCK_DEVICE void await_stragglers(const auto& op) {
    if constexpr (!kHasGinPeers) return;
    const auto& c = op.c;
    if (op.ctx.block_idx() != 0 || thread_idx(op.ctx) != 0) return;
    if (c.scope.operation == OperationKind::kDispatch) {
        CROSSDOCK_ROLLED
        for (uint32_t peer = 0; peer < c.arena.num_ranks; ++peer) {
            if (op.is_gin_peer(peer)) wait_gin(op, WaitStep::kCounts, Signal::kData, peer);
        }
        return;
    }
    CROSSDOCK_ROLLED
    for (uint32_t i = 0; i < c.num_tokens * c.topk; ++i) {
        const uint32_t peer = rank_of_expert(c, expert_id(c, 0, i));
        if (peer != kDropped && op.is_gin_peer(peer)) wait_gin(op, WaitStep::kRow, Signal::kData, peer);
    }
}

}  // namespace
}  // namespace crossdock
