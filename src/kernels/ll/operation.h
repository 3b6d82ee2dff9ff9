// SPDX-License-Identifier: Apache-2.0
// What dispatch and combine share: where things are in the arenas, how an operation begins and ends, credits.
#pragma once

#include "kernels/ll/arguments.h"

namespace crossdock {
inline namespace CROSSDOCK_WORLD {

CROSSDOCK_DEVICE uint64_t* credit_word(const LlCommon& c, int owner, int buffer, int writer) {
    return reinterpret_cast<uint64_t*>(c.peers.at(owner, c.arena.credits_offset())) +
           static_cast<uint64_t>(buffer) * c.arena.num_ranks + static_cast<uint64_t>(writer);
}
CROSSDOCK_DEVICE std::byte* in_buffer(const LlCommon& c, int owner, int buffer, uint64_t offset) {
    return c.peers.at(owner, c.arena.buffer_offset(buffer) + offset);
}
CROSSDOCK_DEVICE uint64_t* entry_word(const LlCommon& c, int owner, int buffer, int writer) {
    return reinterpret_cast<uint64_t*>(in_buffer(c, owner, buffer, c.arena.entries_offset())) + writer;
}
CROSSDOCK_DEVICE uint64_t* count_words(const LlCommon& c, int owner, int buffer, int source) {
    return reinterpret_cast<uint64_t*>(in_buffer(c, owner, buffer, c.arena.counts_offset())) +
           static_cast<uint64_t>(source) * c.arena.count_words_per_source();
}
CROSSDOCK_DEVICE uint64_t* row_flag(const LlCommon& c, int owner, int buffer, uint64_t slot) {
    return reinterpret_cast<uint64_t*>(in_buffer(c, owner, buffer, c.arena.row_flags_offset())) + slot;
}
CROSSDOCK_DEVICE uint64_t* weight_flag(const LlCommon& c, int owner, int buffer, int source) {
    return reinterpret_cast<uint64_t*>(in_buffer(c, owner, buffer, c.arena.weight_flags_offset())) + source;
}
CROSSDOCK_DEVICE std::byte* weights_of(const LlCommon& c, int owner, int buffer, int source) {
    return in_buffer(c, owner, buffer, c.arena.weights_offset()) +
           uint64_t{4} * static_cast<uint64_t>(source) * c.arena.max_tokens * c.arena.topk;
}
CROSSDOCK_DEVICE std::byte* slot_of(const LlCommon& c, int owner, int buffer, uint64_t slot) {
    return in_buffer(c, owner, buffer, c.arena.rows_offset()) + slot * c.arena.slot_bytes();
}
CROSSDOCK_DEVICE std::byte* cell_of(const LlCommon& c, int owner, int buffer, uint64_t cell) {
    return in_buffer(c, owner, buffer, c.arena.rows_offset()) + cell * c.arena.cell_bytes();
}
CROSSDOCK_DEVICE uint64_t* last_use(const LlCommon& c, int buffer, int peer) {
    return reinterpret_cast<uint64_t*>(c.state + 1) + static_cast<uint64_t>(buffer) * c.arena.num_ranks +
           static_cast<uint64_t>(peer);
}

CROSSDOCK_DEVICE LlPending* pending_of(const LlCommon& c) {
    return reinterpret_cast<LlPending*>(c.handle_memory + c.handle.pending_offset());
}
CROSSDOCK_DEVICE int32_t* handle_row_counts(const LlCommon& c) {
    return reinterpret_cast<int32_t*>(c.handle_memory + c.handle.row_counts_offset());
}
CROSSDOCK_DEVICE int32_t* handle_first_rows(const LlCommon& c, int source) {
    return reinterpret_cast<int32_t*>(c.handle_memory + c.handle.first_rows_offset()) +
           static_cast<uint64_t>(source) * c.handle.experts_per_rank;
}
CROSSDOCK_DEVICE std::byte* handle_header(const LlCommon& c, int source, uint32_t slot) {
    return c.handle_memory + c.handle.headers_offset() +
           (static_cast<uint64_t>(source) * c.handle.max_tokens + slot) * row_header_bytes(c.handle.topk);
}

// A choice's global expert id, -1 where it is dropped: negative, or not an expert.
CROSSDOCK_DEVICE int32_t expert_id(const LlCommon& c, uint32_t token_idx, uint32_t k) {
    const uint64_t at = uint64_t{token_idx} * c.topk + k;
    const int64_t id =
        c.ids_are_64_bit ? static_cast<const int64_t*>(c.topk_idx)[at] : static_cast<const int32_t*>(c.topk_idx)[at];
    return id >= 0 && id < static_cast<int64_t>(c.arena.num_experts) ? static_cast<int32_t>(id) : -1;
}
CROSSDOCK_DEVICE int rank_of_expert(const LlCommon& c, int32_t id) {
    return id < 0 ? -1 : static_cast<int>(static_cast<uint32_t>(id) / c.arena.experts_per_rank());
}

inline constexpr uint32_t kSharedHeadBytes = 128;  // of a block's shared memory, for begin_operation and end_operation

// The first thread's part of begin_operation.
CROSSDOCK_DEVICE bool choose_buffer(const Ctx& ctx, const LlCommon& c, Operation& operation) {
    operation.start_ns = ctx.now_ns();
    operation.losses_at_start = ctx.load_relaxed_device(&c.scope.control->losses);
    if (has_failed(ctx, c.scope)) return false;
    if ((c.halves & kSendHalf) == 0) {
        operation.epoch = pending_of(c)->epoch;
        operation.buffer = static_cast<int>(pending_of(c)->buffer);
        return true;
    }
    operation.epoch = c.state->next_epoch;
    for (int i = 0; i < kNumBuffers; ++i) {
        const int buffer = (static_cast<int>(c.state->next_buffer) + i) % kNumBuffers;
        if ((c.state->busy_buffers >> buffer & 1) == 0) {
            operation.buffer = buffer;
            return true;
        }
    }
    WaitScope fatal = c.scope;
    fatal.masking = 0;  // no peer is to blame
    record_expired_wait(ctx, fatal, operation, WaitStep::kBuffer, c.rank, 0, c.state->busy_buffers);
    return false;
}

// False: the group has failed, or every buffer is held by a pending send_only operation (which fails the group). One
// thread decides for its block: threads that saw a failure at different times would part at the next barrier.
CROSSDOCK_DEVICE bool begin_operation(const Ctx& ctx, const LlCommon& c, Operation& operation) {
    struct Head {
        Operation operation;
        uint32_t runs;
    };
    static_assert(sizeof(Head) <= kSharedHeadBytes, "the head of a block's shared memory must hold an operation");
    Head* head = reinterpret_cast<Head*>(ctx.shared_memory());
    if (thread_idx(ctx) == 0) {
        head->operation = Operation{};
        head->runs = choose_buffer(ctx, c, head->operation) ? 1 : 0;
    }
    ctx.block_sync();
    operation = head->operation;
    return head->runs != 0;
}

// The peer has consumed what this rank last wrote to that buffer of it; called before the first write of an operation
// to a peer.
CROSSDOCK_DEVICE bool wait_credit(const Ctx& ctx, const LlCommon& c, const Operation& operation, int peer) {
    if (!is_active(ctx, c.scope, peer)) return false;
    if (ctx.skips_credit()) return true;
    const uint64_t* word = credit_word(c, c.rank, operation.buffer, peer);
    const uint64_t needed = *last_use(c, operation.buffer, peer);
    return wait_until(
        ctx, c.scope, operation, WaitStep::kCredit, peer, needed, [&] { return ctx.load_acquire_system(word); },
        [&](uint64_t seen) { return seen >= needed; });
}

CROSSDOCK_DEVICE bool wait_word(const Ctx& ctx, const LlCommon& c, const Operation& operation, WaitStep step, int peer,
                                const uint64_t* word, uint64_t& payload) {
    uint64_t seen = 0;
    const bool arrived = wait_until(
        ctx, c.scope, operation, step, peer, operation.epoch,
        [&] {
            seen = ctx.load_acquire_system(word);
            return word_epoch(seen);
        },
        [&](uint64_t epoch) { return epoch == operation.epoch; });
    payload = word_payload(seen);
    return arrived;
}

CROSSDOCK_DEVICE bool receives(const LlCommon& c) { return (c.halves & (kReceiveHalf | kCancel)) == kReceiveHalf; }

// The next operation's epoch and buffer; a pending send_only operation keeps its own.
CROSSDOCK_DEVICE void advance_state(const LlCommon& c, const Operation& operation) {
    const uint32_t bit = 1u << operation.buffer;
    if ((c.halves & kSendHalf) == 0) {
        c.state->busy_buffers &= ~bit;
        return;
    }
    c.state->next_epoch = operation.epoch + 1;
    c.state->next_buffer = static_cast<uint32_t>((operation.buffer + 1) % kNumBuffers);
    if ((c.halves & kReceiveHalf) == 0) {
        c.state->busy_buffers |= bit;
        *pending_of(c) = {operation.epoch, static_cast<uint32_t>(operation.buffer)};
    }
}

// Ends the operation in the block that finishes last. If a peer was lost meanwhile, blocks may have seen it
// differently: that block first does the whole receive half once more, alone, with one view of who is there.
template <typename Again>
CROSSDOCK_DEVICE void end_operation(const Ctx& ctx, const LlCommon& c, const Operation& operation, bool ran,
                                    Again again) {
    uint32_t* verdict = reinterpret_cast<uint32_t*>(ctx.shared_memory());  // kSharedHeadBytes: no other use
    const bool is_first_thread = thread_idx(ctx) == 0;
    ctx.block_sync();
    if (is_first_thread) {
        const uint32_t before = ctx.add_acq_rel_device(&c.state->blocks_done, 1);
        *verdict = before + 1 == static_cast<uint32_t>(ctx.num_blocks()) ? 1 : 0;
    }
    ctx.block_sync();
    if (*verdict == 0) return;
    if (ran && (c.halves & kReceiveHalf) != 0) {
        for (uint32_t seen = operation.losses_at_start; (c.halves & kCancel) == 0;) {
            ctx.block_sync();
            if (is_first_thread) *verdict = ctx.load_relaxed_device(&c.scope.control->losses);
            ctx.block_sync();
            if (*verdict == seen) break;
            seen = *verdict;
            again();
        }
        if (is_first_thread && (c.halves & kCancel) != 0) ctx.note_unread_slots_allowed();
        // Everything was read: from here on the peers may write this buffer again.
        for (int peer = thread_idx(ctx); peer < static_cast<int>(c.arena.num_ranks); peer += num_threads(ctx)) {
            if (is_active(ctx, c.scope, peer)) {
                ctx.store_release_system(credit_word(c, peer, operation.buffer, c.rank), operation.epoch);
            }
        }
    }
    if (ran && (c.halves & kSendHalf) != 0) {
        for (int peer = thread_idx(ctx); peer < static_cast<int>(c.arena.num_ranks); peer += num_threads(ctx)) {
            if (is_active(ctx, c.scope, peer)) *last_use(c, operation.buffer, peer) = operation.epoch;
        }
    }
    if (is_first_thread) {
        if (ran) advance_state(c, operation);
        c.state->blocks_done = 0;
    }
}

// The i-th of the rows that sources announced: rows_before[r] rows come from ranks below r.
struct ReceivedRow {
    int source = 0;
    uint32_t slot = 0;

    // Moves on to row i, which must not be before the current one.
    CROSSDOCK_DEVICE void advance(const int* rows_before, int i) {
        while (rows_before[source + 1] <= i) ++source;
        slot = static_cast<uint32_t>(i - rows_before[source]);
    }
};

// Bytes in words of 4 by all lanes.
CROSSDOCK_DEVICE void copy_words(const Ctx& ctx, void* target, const void* source, uint32_t bytes) {
    for (uint32_t i = static_cast<uint32_t>(ctx.lane()); i < bytes / 4; i += kLanes) {
        static_cast<uint32_t*>(target)[i] = static_cast<const uint32_t*>(source)[i];
    }
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
