// SPDX-License-Identifier: Apache-2.0
// High-throughput update between teams: GIN peers are told in a few large puts, and rail peers which tokens they will
// forward to whom.
#pragma once

#include "kernels/ht/update_words.h"

namespace crossdock {
namespace {

// Behind all that the blocks have announced: the last one puts to every GIN peer which of its experts the tokens go to,
// and to the rail peers which tokens they are to forward to whom. By all blocks, once per update.
CROSSDOCK_DEVICE void announce_to_gin_peers(const Ctx& ctx, const HtUpdateArgs& args, const Operation& operation,
                                            const uint32_t* peers) {
    const HtCommon& c = args.common;
    const bool is_last = is_last_at(ctx, &c.state->announced);
    const uint64_t team_bytes = sizeof(uint32_t) * uint64_t{team_size(c)} * c.tables.chunks;
    CROSSDOCK_ROLLED
    for (uint32_t peer = thread_idx(ctx); is_last && peer < c.arena.num_ranks; peer += num_threads(ctx)) {
        if (!is_remote(c.reach, peer) || peers[peer] == kAbsent) continue;
        ctx.fence_system();
        const uint64_t bytes = bitmap_offset(c, 0, c.num_tokens);
        if (bytes > 0) {
            put(ctx, c.reach, peer, bitmap_words_offset(c, operation, c.rank, 0),
                c.outbox.sent_bitmaps.offset + bitmap_offset(c, peer, 0), bytes);
        }
        const uint32_t team = peer / team_size(c);
        if (peer == rail_peer(c, team)) {
            put(ctx, c.reach, peer, c.outbox.rail_masks.offset + uint64_t{own_team(c)} * team_bytes,
                c.outbox.sent_masks.offset + uint64_t{team} * team_bytes, team_bytes);
        }
        put_value_and_raise(ctx, c.reach, peer, c.outbox.tokens.offset + 8 * uint64_t{c.rank}, c.num_tokens,
                            raise_of(c.reach, Signal::kData, peer, operation.epoch));
    }
    ctx.block_sync();
}

// Waits for what each GIN peer has put, and calls hear(peer, its number of tokens). Ends with a barrier of the block.
template <typename Hear>
CROSSDOCK_DEVICE void hear_gin_peers(const Ctx& ctx, const HtCommon& c, const Operation& operation, Hear hear) {
    for_threads(ctx, c.arena.num_ranks, [&](uint32_t source) {
        if (is_remote(c.reach, source) && is_active(ctx, c.scope, source) &&
            wait_gin_peer(ctx, c, operation, WaitStep::kCounts, Signal::kData, source))
            hear(source, c.outbox.tokens.in(c.reach.network.local)[source]);
    });
    ctx.block_sync();
}

// What of this rank's tokens, or of those of the rail peer, goes to any rank of a team; and as routes, what of the
// latter goes to whom. One warp; i: below num_crossing_tasks.
CROSSDOCK_DEVICE uint32_t num_crossing_tasks(const HtCommon& c) {
    if constexpr (!kHasGinPeers) return 0;
    return c.arena.num_ranks + 2 * num_teams(c);
}
CROSSDOCK_DEVICE void number_crossing(const Ctx& ctx, const HtCommon& c, const Operation& operation,
                                      const UpdateShared& shared, uint32_t i) {
    if constexpr (!kHasGinPeers) return;
    const HtTables& t = c.tables;
    uint32_t* rail_masks = c.outbox.rail_masks.in(c.reach.network.local);
    if (i < c.arena.num_ranks) {
        const uint32_t team = i / team_size(c);
        if (team == own_team(c)) return;
        const uint32_t tokens = shared.tokens[rail_peer(c, team)];
        CROSSDOCK_ROLLED
        for (uint32_t chunk = ctx.lane(); chunk < num_chunks(tokens); chunk += kLanes) {
            const uint32_t mask = ctx.load_relaxed_device(rail_masks + i * t.chunks + chunk);
            const uint32_t possible = tokens_of_chunk(tokens, chunk);
            if ((mask & ~possible) != 0)
                refuse_number(ctx, c, operation, PeerNumber::kMask, rail_peer(c, team), possible, mask);
            t.rail_masks[i * t.chunks + chunk] = mask & possible;
        }
        ctx.warp_sync();
        number_chunks(ctx, t.rail_masks + i * t.chunks, t.rail_firsts + i * (t.chunks + 1), num_chunks(tokens));
        return;
    }
    const uint32_t at = i - c.arena.num_ranks;
    const Crossing direction = at < num_teams(c) ? Crossing::kOut : Crossing::kIn;
    const uint32_t team = at % num_teams(c);
    if (team == own_team(c)) return;
    const bool is_out = direction == Crossing::kOut;
    const uint32_t tokens = is_out ? c.num_tokens : shared.tokens[rail_peer(c, team)];
    const uint32_t chunks = num_chunks(tokens);
    uint32_t* from = (is_out ? t.sent_masks : rail_masks) + static_cast<uint32_t>(team * team_size(c)) * t.chunks;
    uint32_t* masks = crossing_masks(c, direction, team);
    CROSSDOCK_ROLLED
    for (uint32_t chunk = ctx.lane(); chunk < chunks; chunk += kLanes) {
        uint32_t mask = 0;
        CROSSDOCK_ROLLED
        for (uint32_t rank = 0; rank < team_size(c); ++rank) mask |= from[rank * t.chunks + chunk];
        masks[chunk] = mask & tokens_of_chunk(tokens, chunk);
    }
    ctx.warp_sync();
    number_chunks(ctx, masks, crossing_firsts(c, direction, team), chunks);
}

// The calling lane.
CROSSDOCK_DEVICE void learn_gin_total(const Ctx& ctx, const HtUpdateArgs& args, const Operation& operation,
                                      uint32_t peer) {
    const HtCommon& c = args.common;
    if (!wait_gin_peer(ctx, c, operation, WaitStep::kRouting, Signal::kTotals, peer)) return;
    const uint32_t total = static_cast<uint32_t>(c.outbox.totals.in(c.reach.network.local)[peer]);
    if (!args.drops && total > c.budget) record_overflow(ctx, c.scope, peer, total, c.budget);
}

}  // namespace
}  // namespace crossdock
