// SPDX-License-Identifier: Apache-2.0
// What the high-throughput operations share: who goes where, and their beginning.
#pragma once

#include "kernels/ht/rings.h"

namespace crossdock {
namespace {

// ---- who goes where ----

CROSSDOCK_DEVICE uint32_t ones_below(uint32_t mask, uint32_t bit) { return number_of_ones(mask & ((1u << bit) - 1)); }

CROSSDOCK_DEVICE uint32_t lowest_one(uint64_t bits) { return number_of_ones((bits & (~bits + 1)) - 1); }

// A channel's share of a source's tokens, for rows, or of its chunks, for weights: [first, end).
struct Share {
    uint32_t first;
    uint32_t end;

    CROSSDOCK_DEVICE static Share of(uint32_t num, uint32_t channel, uint32_t channels) {
        const uint32_t each = num / channels;
        const uint32_t longer = num % channels;  // shares that have one more
        const uint32_t first = channel * each + (channel < longer ? channel : longer);
        return {first, first + each + (channel < longer ? 1 : 0)};
    }
    CROSSDOCK_DEVICE uint32_t size() const { return end - first; }
};

CROSSDOCK_DEVICE Share token_share(const HtCommon& c, uint32_t source, uint32_t channel) {
    return Share::of(c.tables.source_tokens[source], channel, c.channels);
}
CROSSDOCK_DEVICE Share chunk_share(const HtCommon& c, uint32_t source, uint32_t channel) {
    return Share::of(num_chunks(c.tables.source_tokens[source]), channel, c.channels);
}

// The largest of a channel's shares.
template <typename ShareOf>
CROSSDOCK_DEVICE uint32_t largest_share(const HtCommon& c, uint32_t channel, ShareOf share_of) {
    uint32_t most = 0;
    CROSSDOCK_ROLLED
    for (uint32_t source = 0; source < c.arena.num_ranks; ++source) {
        const uint32_t size = share_of(c, source, channel).size();
        most = size > most ? size : most;
    }
    return most;
}

// How many of the tokens before that one are marked; masks and firsts: entries of a source's chunks.
CROSSDOCK_DEVICE uint32_t marked_before(const uint32_t* masks, const uint32_t* firsts, uint32_t token) {
    const uint32_t chunk = token / kChunkTokens;
    const uint32_t bit = token % kChunkTokens;
    return firsts[chunk] + (bit == 0 ? 0 : ones_below(masks[chunk], bit));
}

// A row that this rank sends to a peer, or that a peer returns to it.
struct SentRow {
    bool exists;
    uint32_t number;  // among all rows of that source for that peer
    uint32_t packet;  // among those of this channel

    // The tokens that go there are marked; share: of the source's tokens.
    CROSSDOCK_DEVICE static SentRow of(const uint32_t* masks, const uint32_t* firsts, uint32_t token,
                                       const Share& share) {
        if ((masks[token / kChunkTokens] >> token % kChunkTokens & 1) == 0) return {false, 0, 0};
        const uint32_t number = marked_before(masks, firsts, token);
        return {true, number, number - marked_before(masks, firsts, share.first)};
    }
};

// Of an own token to a peer.
CROSSDOCK_DEVICE SentRow sent_row(const HtCommon& c, uint32_t peer, uint32_t token, const Share& share) {
    const HtTables& t = c.tables;
    return SentRow::of(t.sent_masks + peer * t.chunks, t.sent_firsts + peer * (t.chunks + 1), token, share);
}

// Of a token of another team, whose source rank's agent this rank is, to a rank of this team.
CROSSDOCK_DEVICE SentRow rail_row(const HtCommon& c, uint32_t route, uint32_t token, const Share& share) {
    const HtTables& t = c.tables;
    return SentRow::of(t.rail_masks + route * t.chunks, t.rail_firsts + route * (t.chunks + 1), token, share);
}

// Of a token between its source rank and an agent in another team.
CROSSDOCK_DEVICE SentRow crossing_row(const HtCommon& c, Crossing direction, uint32_t team, uint32_t token,
                                      const Share& share) {
    return SentRow::of(crossing_masks(c, direction, team), crossing_firsts(c, direction, team), token, share);
}

// A row that comes from a source, or goes back to it.
struct ReceivedRow {
    bool exists;
    uint32_t number;  // among all received rows
    uint32_t packet;  // among those of this source and channel
};

// share: of the source's tokens.
CROSSDOCK_DEVICE ReceivedRow received_row(const HtCommon& c, uint32_t source, uint32_t token, const Share& share) {
    const HtTables& t = c.tables;
    const uint32_t* masks = t.masks + source * t.chunks;
    if ((masks[token / kChunkTokens] >> token % kChunkTokens & 1) == 0) return {false, 0, 0};
    const uint32_t* firsts = t.firsts + source * t.chunks;
    const uint32_t number = marked_before(masks, firsts, token);
    return {true, number, number - marked_before(masks, firsts, share.first)};
}

// How many rows come of a share of a source's tokens.
CROSSDOCK_DEVICE uint32_t num_received(const HtCommon& c, uint32_t source, const Share& share) {
    if (share.size() == 0) return 0;
    const uint32_t* masks = c.tables.masks + source * c.tables.chunks;
    const uint32_t* firsts = c.tables.firsts + source * c.tables.chunks;
    const uint32_t last = share.end - 1;
    const uint32_t is_marked = masks[last / kChunkTokens] >> last % kChunkTokens & 1;
    return marked_before(masks, firsts, last) + is_marked - marked_before(masks, firsts, share.first);
}

// ---- an operation's beginning ----

// The beginning of every block's shared memory.
struct HtBlockHead {
    uint64_t epoch;
    uint64_t start_ns;
    Terms terms;  // this rank's
    uint32_t verdict;
    uint32_t failures;  // threads that have found the group failed
};
static_assert(sizeof(HtBlockHead) <= kGinStatesOffset);

CROSSDOCK_DEVICE HtBlockHead* ht_block_head(const Ctx& ctx) {
    return reinterpret_cast<HtBlockHead*>(ctx.shared_memory());
}

// What a peer with windows of the same kind is to this rank.
CROSSDOCK_DEVICE PeerState state_in_windows(const HtCommon& c) { return c.windows_are_inputs ? kReadable : kDirect; }

// Whether and which of this rank's tensors are in windows, and a hash of where there.
inline constexpr uint32_t kStateBits = 2;
CROSSDOCK_DEVICE uint64_t entered_payload(const HtCommon& c) {
    if (!c.has_windows) return kEntered;
    const uint64_t places = hash_of(c.window_places, static_cast<uint32_t>(kPayloadBits) - kStateBits);
    return places << kStateBits | state_in_windows(c);
}

// What an LSA peer learns beside the terms: of an update how many tokens this rank has, of others where its window
// begins.
CROSSDOCK_DEVICE uint64_t told_with_terms(const HtCommon& c) {
    return c.scope.operation == OperationKind::kUpdate ? c.num_tokens : c.window_offset;
}

CROSSDOCK_DEVICE Terms terms_of(const HtCommon& c) {
    if (c.scope.operation == OperationKind::kUpdate) return c.terms;
    constexpr uint32_t kBits = Terms::bits_of(static_cast<uint32_t>(Term::kRouting));
    constexpr uint32_t kShift = Terms::shift_of(Term::kRouting);
    return {c.terms.word | Terms::fold(kBits, c.tables.routing->update) << kShift};
}

// The operation's number, the same on every rank. The first block tells every peer that this rank has entered it:
// whatever was announced to it before has been read, and what its stream wrote before may be read; and its terms.
// meanwhile(): what needs no number, done by all warps before the block's barrier; the last one asks for the number.
template <typename Meanwhile>
CROSSDOCK_DEVICE Operation begin_operation(const Ctx& ctx, const HtCommon& c, Meanwhile meanwhile) {
    HtBlockHead* head = ht_block_head(ctx);
    if (ctx.warp_idx() == ctx.num_warps() - 1 && is_leader(ctx)) {
        const uint64_t clock = ctx.add_relaxed_device(&c.state->clock, 1);
        const uint64_t epoch = clock >> kHtTicketBits;
        const uint64_t ticket = clock & ((uint64_t{1} << kHtTicketBits) - 1);
        if (ticket + 1 == ctx.num_blocks()) {
            ctx.exchange_release_device(&c.state->clock, (epoch + 1) << kHtTicketBits);
        }
        head->epoch = epoch;
        head->start_ns = ctx.now_ns();
        head->terms = terms_of(c);
        head->failures = 0;
    }
    ctx.warp_sync();
    meanwhile();
    ctx.block_sync();
    Operation operation;
    operation.epoch = head->epoch;
    operation.start_ns = head->start_ns;
    if (ctx.block_idx() == 0) {
        if (thread_idx(ctx) == 0) ctx.store_relaxed_device(&c.state->claimed[(operation.epoch + 1) % 2], 0);
        // By the last warps: the release takes about 1 us, and the first ones have more to do.
        CROSSDOCK_ROLLED
        for (uint32_t peer = num_threads(ctx) - 1 - thread_idx(ctx); peer < c.arena.num_ranks;
             peer += num_threads(ctx)) {
            if (!is_active(ctx, c.scope, peer)) continue;
            if (is_remote(c.reach, peer)) {
                put_value_and_raise(ctx, c.reach, peer, terms_offset(c, operation, c.rank), head->terms.word,
                                    raise_of(c.reach, Signal::kEntered, peer, operation.epoch));
            } else {
                ctx.store_release_system(entered_word(c, operation, peer, c.rank),
                                         pack_word(operation.epoch, entered_payload(c)));
                // Behind it: a release would wait until these have landed.
                ctx.store_tagged(terms_word(c, operation, peer, c.rank), head->terms.word,
                                 pack_word(operation.epoch, told_with_terms(c)));
            }
        }
    }
    return operation;
}

// Nothing of a peer with other terms may be used: the group fails. A rank without rows may not know what they are like,
// which matters only if it forwards those of others.
CROSSDOCK_DEVICE bool agrees(const Ctx& ctx, const HtCommon& c, const Operation& operation, uint32_t peer,
                             Terms theirs) {
    const Terms own = ht_block_head(ctx)->terms;
    uint64_t differ = own.word ^ theirs.word;
    if (differ == 0) return true;
    constexpr uint64_t kUnits = Terms::mask_of(Term::kRowUnits);
    constexpr uint64_t kOfRows = kUnits | Terms::mask_of(Term::kScaleUnits) | Terms::mask_of(Term::kDtype);
    if (!kHasGinPeers && ((own.word & kUnits) == 0 || (theirs.word & kUnits) == 0)) differ &= ~kOfRows;
    if (differ == 0) return true;
    record_peer_fault(ctx, c.scope, operation, PeerFaultKind::kDisagrees, PeerNumber::kNone, peer, own.word,
                      own.word ^ differ);
    return false;
}

// How many rows a route has, whose packets pass this rank. num_tokens: of this rank's routing.
CROSSDOCK_DEVICE uint32_t rows_of_route(const HtCommon& c, uint32_t route, uint32_t num_tokens) {
    const HtTables& t = c.tables;
    const uint64_t at = uint64_t{route} * (t.chunks + 1);
    const uint32_t team = route / team_size(c);
    if (team == own_team(c)) return t.sent_firsts[at + num_chunks(num_tokens)];
    return t.rail_firsts[at + num_chunks(t.source_tokens[rail_peer(c, team)])];
}

// Where the rows end that this rank reads or writes in a peer's window.
CROSSDOCK_DEVICE uint64_t end_in_window(const HtCommon& c, uint32_t peer) {
    if (c.windows_are_inputs) {
        const Share all{0, c.tables.source_tokens[peer]};
        return num_received(c, peer, all) > 0 ? all.end : 0;
    }
    uint64_t end = 0;
    CROSSDOCK_ROLLED
    for (uint32_t route = peer - first_of_team(c); route < c.arena.num_ranks; route += team_size(c)) {
        const uint32_t rows = rows_of_route(c, route, c.tables.routing->num_tokens);
        const uint64_t route_end = rows == 0 ? 0 : uint64_t{c.tables.bases[route]} + rows;
        end = route_end > end ? route_end : end;
    }
    return end < c.budget ? end : c.budget;
}

// Both ends have windows of the same kind. They must lie alike, and hold all rows that this rank reads or writes there.
// window_offset: the peer's.
CROSSDOCK_DEVICE bool may_reach_window(const Ctx& ctx, const HtCommon& c, const Operation& operation, uint32_t peer,
                                       uint64_t payload, uint64_t window_offset) {
    if (payload != entered_payload(c)) {
        record_peer_fault(ctx, c.scope, operation, PeerFaultKind::kDisagrees,
                          window_offset == c.window_offset ? PeerNumber::kWindows : PeerNumber::kWindowOffset, peer,
                          c.window_offset, window_offset);
        // Who has no window, or is in another team, has not seen it.
        leave_peer(ctx, c, operation, peer, FailureReport{true, true, c.rank, peer}.pack());
        return false;
    }
    const uint64_t end = end_in_window(c, peer);
    if (end <= c.window_rows) return true;
    refuse_number(ctx, c, operation, PeerNumber::kEndInWindow, peer, c.window_rows, end);
    return false;
}

// The peer's state once it has entered this operation: then its rings and windows may be written. own_is_direct: what
// this rank has for itself passes no ring. told: the number that came with its terms. The calling lane.
CROSSDOCK_DEVICE uint32_t wait_entered(const Ctx& ctx, const HtCommon& c, const Operation& operation, uint32_t peer,
                                       bool own_is_direct, uint64_t& told) {
    if (!is_active(ctx, c.scope, peer)) return kAbsent;
    const uint64_t* word = entered_word(c, operation, c.rank, peer);
    const TaggedWord* with_terms = terms_word(c, operation, c.rank, peer);
    const bool had_failed = has_failed(ctx, c.scope);  // looked at together with the words
    TaggedWord terms{};
    uint64_t seen = 0;
    const bool came = wait_for(
        ctx, c, operation, WaitStep::kEntry, peer, operation.epoch,
        [&] {
            terms = ctx.load_tagged(with_terms);
            seen = ctx.load_acquire_system(word);
            return word_epoch(seen) == operation.epoch ? word_epoch(terms.tag) : word_epoch(seen);
        },
        [&](uint64_t epoch) { return epoch == operation.epoch; });
    if (!came || had_failed) return kAbsent;
    if (peer == c.rank) return own_is_direct ? state_in_windows(c) : kEntered;
    if (!agrees(ctx, c, operation, peer, {terms.payload})) return kAbsent;
    told = word_payload(terms.tag);
    const bool are_of_a_kind = c.has_windows && (word_payload(seen) & ((1u << kStateBits) - 1)) == state_in_windows(c);
    // Inputs may lie anywhere: those of two ranks that do not lie alike pass rings.
    const bool pass_rings =
        c.windows_are_inputs && (word_payload(seen) != entered_payload(c) || told != c.window_offset);
    if (!are_of_a_kind || pass_rings) return kEntered;
    return may_reach_window(ctx, c, operation, peer, word_payload(seen), told) ? state_in_windows(c) : kAbsent;
}

// Waits for a signal of a GIN peer. The calling lane.
CROSSDOCK_DEVICE bool wait_gin_peer(const Ctx& ctx, const HtCommon& c, const Operation& operation, WaitStep step,
                                    Signal signal, uint32_t peer) {
    const uint64_t* word = signal_word(c.reach, signal, peer);
    return wait_for(
        ctx, c, operation, step, peer, operation.epoch, [&] { return ctx.load_acquire_system(word); },
        [&](uint64_t epoch) { return epoch >= operation.epoch; });
}

// The same for all peers at once, into shared memory. How rows of a source in another team go inside this team is a
// matter between its agent and this rank. Calls hear(peer, told) for each LSA peer that has entered. Ends with a
// barrier of the block. Returns false, in all threads, if the group has failed.
template <typename Hear>
CROSSDOCK_DEVICE bool wait_all_entered(const Ctx& ctx, const HtCommon& c, const Operation& operation, uint32_t* peers,
                                       bool own_is_direct, Hear hear) {
    HtBlockHead* head = ht_block_head(ctx);
    const uint32_t num_ranks = c.arena.num_ranks;
    CROSSDOCK_ROLLED
    for (uint32_t peer = thread_idx(ctx); peer < num_ranks; peer += num_threads(ctx)) {
        if (is_remote(c.reach, peer)) {
            const bool came =
                !has_failed(ctx, c.scope) && wait_gin_peer(ctx, c, operation, WaitStep::kEntry, Signal::kEntered, peer);
            const uint64_t at = terms_offset(c, operation, peer) + offsetof(TaggedWord, payload);
            peers[peer] =
                came && agrees(ctx, c, operation, peer, {*in_own_arena<uint64_t>(c, at)}) ? kEntered : kAbsent;
        } else {
            uint64_t told = 0;
            peers[peer] = wait_entered(ctx, c, operation, peer, own_is_direct, told);
            if (peers[peer] != kAbsent) hear(peer, told);
        }
        if (peers[peer] == kAbsent && has_failed(ctx, c.scope)) ctx.add_shared(&head->failures, 1);
    }
    ctx.block_sync();
    if constexpr (kHasGinPeers) {
        CROSSDOCK_ROLLED
        for (uint32_t peer = thread_idx(ctx); peer < num_ranks; peer += num_threads(ctx)) {
            if (is_remote(c.reach, peer) && peers[peer] != kAbsent) peers[peer] = peers[agent_of(c, peer)];
        }
        ctx.block_sync();
    }
    return head->failures == 0;
}

// Claims the next piece of work. One warp; only the leader gets the result, after the latency of a global atomic.
CROSSDOCK_DEVICE uint32_t ask_next(const Ctx& ctx, const HtCommon& c, const Operation& operation) {
    return is_leader(ctx) ? ctx.add_relaxed_device(&c.state->claimed[operation.epoch % 2], 1u) : 0;
}
CROSSDOCK_DEVICE uint32_t claim_next(const Ctx& ctx, const HtCommon& c, const Operation& operation) {
    return ctx.warp_broadcast(ask_next(ctx, c, operation));
}

// All blocks of this rank's kernel meet; at most once per kernel, which then ends with is_last_block. False: the group
// has failed.
CROSSDOCK_DEVICE bool meet_blocks(const Ctx& ctx, const HtCommon& c, const Operation& operation) {
    HtBlockHead* head = ht_block_head(ctx);
    const uint32_t blocks = ctx.num_blocks();
    ctx.block_sync();
    if (thread_idx(ctx) == 0) {
        uint32_t* arrived = &c.state->arrived[0];
        ctx.add_acq_rel_device(arrived, 1);
        const bool met = wait_for(
            ctx, c, operation, WaitStep::kBarrier, c.rank, blocks,
            [&] { return uint64_t{ctx.load_acquire_device(arrived)}; },
            [&](uint64_t count) { return count >= blocks; });
        head->verdict = met ? 1 : 0;
    }
    ctx.block_sync();
    return head->verdict != 0;
}

// This block is the last of the kernel's to come to that counter, once per kernel; what the others have written is
// visible to it. The counter is zero again afterwards.
CROSSDOCK_DEVICE bool is_last_at(const Ctx& ctx, uint32_t* counter) {
    HtBlockHead* head = ht_block_head(ctx);
    ctx.block_sync();
    if (thread_idx(ctx) == 0) {
        const bool is_last = ctx.add_acq_rel_device(counter, 1) + 1 == ctx.num_blocks();
        if (is_last) ctx.store_relaxed_device(counter, 0);
        head->verdict = is_last ? 1 : 0;
    }
    ctx.block_sync();
    return head->verdict != 0;
}

// The same at the kernel's end.
CROSSDOCK_DEVICE bool is_last_block(const Ctx& ctx, const HtCommon& c) {
    const bool is_last = is_last_at(ctx, &c.state->arrived[1]);
    if (is_last && thread_idx(ctx) == 0) ctx.store_relaxed_device(&c.state->arrived[0], 0);
    return is_last;
}

// Flat rows beyond the receiver's budget do not travel; both sides know. Expert-major rows do, since one of their slots
// may lie within it.
CROSSDOCK_DEVICE bool travels(const HtCommon& c, uint32_t row_number) {
    return c.expert_major || row_number < c.budget;
}

CROSSDOCK_DEVICE const uint64_t* bitmap_of(const HtCommon& c, uint32_t source, uint32_t token) {
    return c.tables.bitmaps + (uint64_t{source} * c.arena.max_tokens + token) * c.tables.words;
}

// Expert-major: the slot of a row at a local expert that its token has.
CROSSDOCK_DEVICE uint32_t slot_of(const HtCommon& c, uint32_t expert, uint32_t source, uint32_t chunk, uint32_t bit) {
    const HtTables& t = c.tables;
    const uint64_t at = (uint64_t{1} + expert) * c.arena.num_ranks * t.chunks + source * t.chunks + chunk;
    return t.zones[expert] + t.firsts[at] + ones_below(t.masks[at], bit);
}

// A received row that a warp is about to handle.
struct PlannedRow {
    uint32_t peer;
    uint32_t chunk;  // of the peer's tokens
    uint32_t bit;
    uint32_t number;  // among all received rows
    uint32_t packet;  // among those of the peer and channel
    uint32_t num_slots;
};

// How many rows a warp looks up at once.
CROSSDOCK_HOST_DEVICE constexpr uint32_t planned_rows(uint32_t topk) {
    constexpr uint32_t kMostRows = 32;
    constexpr uint32_t kMostSlots = 256;
    const uint32_t rows = topk == 0 ? kMostRows : kMostSlots / topk;
    return rows < 1 ? 1 : rows < kMostRows ? rows : kMostRows;
}

// Such rows; in shared memory.
struct HtBatch {
    PlannedRow* rows;  // [planned_rows]
    uint32_t* slots;   // [planned_rows][topk]

    CROSSDOCK_HOST_DEVICE constexpr void lay_out(auto& memory, uint32_t topk) {
        memory.take(rows, planned_rows(topk));
        memory.take(slots, planned_rows(topk) * topk);
    }
    CROSSDOCK_DEVICE static HtBatch of(const Ctx& ctx, const HtShared& shared, uint32_t topk, uint32_t number) {
        return view_of<HtBatch>(shared.batches.in(ctx.shared_memory()) + shared.batch_bytes * number, topk);
    }
};

// Tensors that an elastic combine's sums begin with.
inline constexpr uint32_t kMostBiases = 2;

// What a warp knows of a token's rows; in shared memory.
struct HtPlan {
    const std::byte** rows;  // [kMostBiases + topk]
    uint32_t* slots;         // the same
    uint32_t* origins;       // the same: whose the row is: a rank, or what else has a row of a sum

    CROSSDOCK_HOST_DEVICE constexpr void lay_out(auto& memory, uint32_t topk) {
        memory.take(rows, kMostBiases + topk);
        memory.take(slots, kMostBiases + topk);
        memory.take(origins, kMostBiases + topk);
    }
    CROSSDOCK_DEVICE static HtPlan of_warp(const Ctx& ctx, const HtShared& shared, uint32_t topk) {
        return view_of<HtPlan>(shared.plans.in(ctx.shared_memory()) + shared.plan_bytes * ctx.warp_idx(), topk);
    }
};

// The place of one number n, counted from 0 and from the lowest on.
CROSSDOCK_DEVICE uint32_t nth_one(uint64_t bits, uint32_t n) {
    CROSSDOCK_ROLLED
    for (; n > 0; --n) bits &= bits - 1;
    return lowest_one(bits);
}

// This rank's expert number n of those in a token's bitmap, in ascending order. Returns false if there are fewer.
CROSSDOCK_DEVICE bool find_expert(const HtCommon& c, const uint64_t* bitmap, uint32_t n, uint32_t& expert) {
    CROSSDOCK_ROLLED
    for (uint32_t w = 0; w < c.tables.words; ++w) {
        const uint64_t bits = bitmap[w];
        const uint32_t num = number_of_ones(bits);
        if (n < num) {
            expert = 64 * w + nth_one(bits, n);
            return true;
        }
        n -= num;
    }
    return false;
}

// A received row's places among `limit` rows of a tensor: a flat row's own, expert-major one for each expert, in
// ascending order of experts. Returns how many. One warp; all lanes may read the places after a warp barrier.
CROSSDOCK_DEVICE uint32_t list_slots(const Ctx& ctx, const HtCommon& c, uint32_t source, uint32_t chunk, uint32_t bit,
                                     uint32_t row, uint64_t limit, uint32_t* slots) {
    if (!c.expert_major) {
        if (is_leader(ctx)) slots[0] = row;
        return row < limit ? 1 : 0;
    }
    const uint64_t* bitmap = bitmap_of(c, source, chunk * kChunkTokens + bit);
    uint32_t num = 0;
    CROSSDOCK_ROLLED
    for (uint32_t first = 0; first < c.topk; first += kLanes) {
        uint32_t expert = 0;
        const bool exists = first + ctx.lane() < c.topk && find_expert(c, bitmap, first + ctx.lane(), expert);
        const uint32_t slot = exists ? slot_of(c, expert, source, chunk, bit) : 0;
        const bool is_place = exists && slot < c.budget && slot < limit;
        const uint32_t at = num + ctx.warp_count_before(is_place);
        if (is_place) slots[at] = slot;
        num += ctx.warp_count(is_place);
    }
    return num;
}

// No place: the row lies behind the budget or the tensor's end.
inline constexpr uint32_t kNoSlot = UINT32_MAX;

// The same by one lane. keeps_omitted: kNoSlot stands for those that are no places.
template <bool keeps_omitted = false>
CROSSDOCK_DEVICE uint32_t list_slots(const HtCommon& c, uint32_t source, uint32_t chunk, uint32_t bit, uint32_t row,
                                     uint64_t limit, uint32_t* slots) {
    if (!c.expert_major) {
        slots[0] = row;
        return row < limit ? 1 : 0;
    }
    const uint64_t* bitmap = bitmap_of(c, source, chunk * kChunkTokens + bit);
    uint32_t num = 0;
    CROSSDOCK_ROLLED
    for (uint32_t w = 0; w < c.tables.words; ++w) {
        CROSSDOCK_ROLLED
        for (uint64_t bits = bitmap[w]; bits != 0; bits &= bits - 1) {
            const uint32_t slot = slot_of(c, 64 * w + lowest_one(bits), source, chunk, bit);
            const bool is_place = slot < c.budget && slot < limit;
            if (is_place || keeps_omitted) slots[num++] = is_place ? slot : kNoSlot;
        }
    }
    return num;
}

// ---- stages ----

CROSSDOCK_DEVICE uint32_t* peer_states(const Ctx& ctx, const HtShared& shared) {
    return shared.peers.in(ctx.shared_memory());
}

// No peer takes or sends packets: then nothing keeps warps from taking tokens in any order.
CROSSDOCK_DEVICE bool are_all_direct(const Ctx& ctx, const HtCommon& c, const HtShared& shared) {
    bool are = true;
    CROSSDOCK_ROLLED
    for (uint32_t peer = ctx.lane(); peer < c.arena.num_ranks; peer += kLanes)
        are = are && peer_states(ctx, shared)[peer] != kEntered;
    return ctx.warp_all(are);
}

// The warp's stage number i.
CROSSDOCK_DEVICE RowStage stage_of_warp(const Ctx& ctx, const HtWarpLayout& warp_layout, const HtShared& shared,
                                        uint32_t i) {
    const uint32_t warp = ctx.warp_idx();
    const uint32_t before = warp < warp_layout.producers
                                ? warp * warp_layout.producer_stages
                                : warp_layout.producers * warp_layout.producer_stages +
                                      (warp - warp_layout.producers) * warp_layout.consumer_stages;
    return RowStage(shared.stages.in(ctx.shared_memory()) + shared.stage_bytes * (before + i));
}

// Followed by a barrier of the block.
CROSSDOCK_DEVICE void init_stages(const Ctx& ctx, const HtWarpLayout& warp_layout, const HtShared& shared) {
    const uint32_t warp = ctx.warp_idx();
    const uint32_t stages = warp < warp_layout.producers                           ? warp_layout.producer_stages
                            : warp < warp_layout.producers + warp_layout.consumers ? warp_layout.consumer_stages
                                                                                   : 0;
    CROSSDOCK_ROLLED
    for (uint32_t i = 0; is_leader(ctx) && i < stages; ++i) stage_of_warp(ctx, warp_layout, shared, i).init();
    RowStage::initialised();
}

}  // namespace
}  // namespace crossdock
