// SPDX-License-Identifier: Apache-2.0
// High-throughput routing update: one kernel. Every rank sends every peer a bitmap per token of the peer's experts that
// the token goes to, in words that carry their own flag; the receiver numbers its rows in order (source, token) and
// tells each source where its rows begin. The result does not depend on the ranks' timing. Contract: nccl_ep.h,
// ncclEpUpdateHandle; protocol: docs/protocol.md.
#pragma once

#include "kernels/counters.h"
#include "kernels/ht/update_cross.h"

namespace crossdock {
namespace {

// ---- send ----

// Some of a token's choices, as they are kept: global ids; -1: dropped, or there is none.
struct Choices {
    static constexpr uint32_t kMost = 8;
    int32_t ids[kMost];

    CROSSDOCK_DEVICE static Choices of(const HtCommon& c, uint32_t token, uint32_t first) {
        Choices choices;
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kMost; ++i)
            choices.ids[i] = first + i < c.topk ? c.tables.ids[uint64_t{token} * c.topk + first + i] : -1;
        return choices;
    }
};

// Keeps the choices of a chunk of own tokens. One warp.
CROSSDOCK_DEVICE void keep_choices(const Ctx& ctx, const HtUpdateArgs& args, uint32_t chunk) {
    const HtCommon& c = args.common;
    const int64_t experts = int64_t{c.arena.experts_per_rank} * c.arena.num_ranks;
    const uint32_t first = chunk * kChunkTokens;
    const uint32_t num = c.num_tokens - first < kChunkTokens ? c.num_tokens - first : kChunkTokens;
    const uint64_t at = uint64_t{first} * c.topk;
    CROSSDOCK_ROLLED
    for (uint32_t base = ctx.lane(); base < num * c.topk; base += kLanes * Choices::kMost) {
        int64_t ids[Choices::kMost];
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < Choices::kMost; ++i) {
            const uint32_t choice = base + i * kLanes;
            ids[i] = -1;
            if (choice < num * c.topk)
                ids[i] = args.ids_are_64_bit ? static_cast<const int64_t*>(args.topk_idx)[at + choice]
                                             : static_cast<const int32_t*>(args.topk_idx)[at + choice];
        }
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < Choices::kMost; ++i) {
            const uint32_t choice = base + i * kLanes;
            const bool is_expert = ids[i] >= 0 && ids[i] < experts;
            if (choice < num * c.topk) c.tables.ids[at + choice] = is_expert ? static_cast<int32_t>(ids[i]) : -1;
        }
    }
    ctx.warp_sync();
}

// On GPUs a lane has one token of a chunk, of which few choices stay in registers.
CROSSDOCK_DEVICE bool are_choices_held(const HtCommon& c) { return kLanes >= kChunkTokens && c.topk <= Choices::kMost; }
CROSSDOCK_DEVICE Choices held_choices(const Ctx& ctx, const HtCommon& c, uint32_t chunk) {
    const uint32_t token = chunk * kChunkTokens + ctx.lane();
    return are_choices_held(c) && token < c.num_tokens ? Choices::of(c, token, 0) : Choices{};
}

// Those of the choices that are among 64 experts from `first` on.
CROSSDOCK_DEVICE uint64_t bitmap_of_choices(const Choices& choices, int32_t first, int32_t num) {
    uint64_t bits = 0;
    CROSSDOCK_UNROLL
    for (uint32_t i = 0; i < Choices::kMost; ++i) {
        const int32_t at = choices.ids[i] - first;
        if (choices.ids[i] >= 0 && at >= 0 && at < num) bits |= uint64_t{1} << at;
    }
    return bits;
}

// Tells every peer of a chunk of own tokens. choices: the lane's, where they are held. One warp.
CROSSDOCK_DEVICE void announce_chunk(const Ctx& ctx, const HtCommon& c, const Operation& operation, uint32_t chunk,
                                     Choices choices) {
    const HtTables& t = c.tables;
    const uint32_t first = chunk * kChunkTokens;
    const uint32_t num = c.num_tokens - first < kChunkTokens ? c.num_tokens - first : kChunkTokens;
    const int32_t experts = static_cast<int32_t>(c.arena.experts_per_rank);
    const uint64_t tag = pack_word(operation.epoch, 0);
    const bool are_held = are_choices_held(c);
    CROSSDOCK_ROLLED
    for (uint32_t i = 0; i < c.arena.num_ranks; ++i) {
        const uint32_t peer = (c.rank + i) % c.arena.num_ranks;
        uint32_t mask = 0;
        const bool is_told = is_active(ctx, c.scope, peer);
        CROSSDOCK_ROLLED
        for (uint32_t bit = ctx.lane(); is_told && bit < num; bit += kLanes) {
            TaggedWord* words = outgoing_bitmap_words(c, operation, peer, first + bit);
            CROSSDOCK_ROLLED
            for (uint32_t w = 0; w < t.words; ++w) {
                const int32_t here = experts - static_cast<int32_t>(64 * w);
                uint64_t bits = 0;
                CROSSDOCK_ROLLED
                for (uint32_t base = 0; base < c.topk; base += Choices::kMost) {
                    if (!are_held) choices = Choices::of(c, first + bit, base);
                    bits |=
                        bitmap_of_choices(choices, static_cast<int32_t>(peer) * experts + static_cast<int32_t>(64 * w),
                                          here < 64 ? here : 64);
                }
                if (bits != 0) mask |= 1u << bit;
                ctx.store_tagged(words + w, bits, tag);
            }
        }
        mask = ctx.warp_or(mask);
        if (is_leader(ctx)) {
            t.sent_masks[peer * t.chunks + chunk] = mask;
            if constexpr (kHasGinPeers) {
                if (is_remote(c.reach, peer))
                    c.outbox.sent_masks.in(c.reach.network.local)[peer * t.chunks + chunk] = mask;
            }
        }
    }
}

// ---- receive ----

// Returns a source's number of tokens, or 0 if what it told is out of range. One lane.
CROSSDOCK_DEVICE uint32_t expect_tokens(const Ctx& ctx, const HtCommon& c, const Operation& operation, uint32_t source,
                                        uint64_t told) {
    if (source == c.rank) return c.num_tokens;
    if (told <= c.arena.max_tokens) return static_cast<uint32_t>(told);
    refuse_number(ctx, c, operation, PeerNumber::kTokens, source, c.arena.max_tokens, told);
    return 0;
}

// Waits for the next kMost of a token's `words` bitmap words from `from` on; zeros if the source is lost. One lane.
template <uint32_t kMost>
CROSSDOCK_DEVICE void wait_bitmap(const Ctx& ctx, const HtCommon& c, const Operation& operation, uint32_t source,
                                  const TaggedWord* from, uint32_t words, uint64_t (&bitmap)[kMost]) {
    const bool came = wait_for(
        ctx, c, operation, WaitStep::kRouting, source, operation.epoch,
        [&] {
            TaggedWord seen[kMost] = {};
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kMost; ++i) {
                if (i < words) seen[i] = ctx.load_tagged(from + i);
            }
            uint64_t other = operation.epoch;
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kMost; ++i) {
                bitmap[i] = seen[i].payload;
                if (i < words && word_epoch(seen[i].tag) != operation.epoch) other = word_epoch(seen[i].tag);
            }
            return other;
        },
        [&](uint64_t epoch) { return epoch == operation.epoch; });
    CROSSDOCK_UNROLL
    for (uint32_t i = 0; i < kMost; ++i) bitmap[i] = came ? bitmap[i] : 0;
}

// A chunk of a source's tokens: keeps their bitmaps, and for each local expert which of the tokens come. What is kept
// is what was judged: the words are looked at once. One warp.
CROSSDOCK_DEVICE void receive_chunk(const Ctx& ctx, const HtUpdateArgs& args, const Operation& operation,
                                    uint32_t source, uint32_t chunk, uint32_t tokens) {
    constexpr uint32_t kWordsAtOnce = kLanes > 1 ? 4 : 1;  // on their way together
    const HtCommon& c = args.common;
    const HtTables& t = c.tables;
    const uint32_t first = chunk * kChunkTokens;
    const uint32_t num = tokens - first < kChunkTokens ? tokens - first : kChunkTokens;
    const uint64_t entry = source * t.chunks + chunk;
    const uint64_t column = uint64_t{c.arena.num_ranks} * t.chunks;
    uint64_t* bitmaps = t.bitmaps + (uint64_t{source} * c.arena.max_tokens + first) * t.words;
    // On GPUs a lane has one token, and what it keeps of few experts stays in registers.
    const bool is_held = kLanes >= kChunkTokens && t.words <= kWordsAtOnce;
    uint64_t held[kWordsAtOnce] = {};
    const uint64_t experts_of_last = ~uint64_t{0} >> (64 * t.words - c.arena.experts_per_rank);
    uint32_t rows = 0;
    CROSSDOCK_ROLLED
    for (uint32_t bit = ctx.lane(); bit < num; bit += kLanes) {
        uint32_t choices = 0;
        uint64_t invalid = 0;  // bits above the last expert
        CROSSDOCK_ROLLED
        for (uint32_t base = 0; base < t.words; base += kWordsAtOnce) {
            wait_bitmap(ctx, c, operation, source, bitmap_words(c, operation, c.rank, source, first + bit) + base,
                        t.words - base, held);
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kWordsAtOnce; ++i) {
                if (base + i >= t.words) continue;
                bitmaps[bit * t.words + base + i] = held[i];
                choices += number_of_ones(held[i]);
                if (base + i == t.words - 1) invalid = held[i] & ~experts_of_last;
            }
        }
        if (invalid != 0) {
            refuse_number(ctx, c, operation, PeerNumber::kExpert, source, c.arena.experts_per_rank - 1,
                          64 * (t.words - 1) + lowest_one(invalid));
        } else if (choices > c.topk) {
            refuse_number(ctx, c, operation, PeerNumber::kExpertsOfToken, source, c.topk, choices);
        }
        if (invalid != 0 || choices > c.topk) {
            CROSSDOCK_ROLLED
            for (uint32_t w = 0; w < t.words; ++w) bitmaps[bit * t.words + w] = 0;
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kWordsAtOnce; ++i) held[i] = 0;
        } else if (choices > 0) {
            rows |= 1u << bit;
        }
    }
    ctx.warp_sync();
    CROSSDOCK_ROLLED
    for (uint32_t base = 0; base < c.arena.experts_per_rank; base += kLanes) {
        const uint32_t w = base / 64;
        uint32_t mine = 0;  // the mask of the lane's expert
        CROSSDOCK_ROLLED
        for (uint32_t of_lane = 0; of_lane < num; of_lane += kLanes) {
            const uint32_t bit = of_lane + ctx.lane();
            uint64_t own = held[0];
            CROSSDOCK_UNROLL
            for (uint32_t i = 1; i < kWordsAtOnce; ++i) own = i == w ? held[i] : own;
            if (!is_held) own = bit < num ? bitmaps[bit * t.words + w] : 0;
            mine |= ctx.warp_transpose(static_cast<uint32_t>(own >> base % 64)) << of_lane;
        }
        const uint32_t expert = base + ctx.lane();
        if (expert < c.arena.experts_per_rank) t.masks[(uint64_t{1} + expert) * column + entry] = mine;
    }
    rows = ctx.warp_or(rows);
    if (is_leader(ctx)) t.masks[entry] = rows;
}

// ---- numbering ----

// Sends each source the number of its first row here (its base) and the total. `step` threads share the sources; the
// caller begins with `first`.
CROSSDOCK_DEVICE void send_bases(const Ctx& ctx, const HtCommon& c, const Operation& operation, uint32_t total,
                                 uint32_t first, uint32_t step) {
    CROSSDOCK_ROLLED
    for (uint32_t peer = first; peer < c.arena.num_ranks; peer += step) {
        if (!is_active(ctx, c.scope, peer)) continue;
        ctx.store_tagged(base_word(c, agent_of(c, peer), route_of(c, peer, c.rank)),
                         pack_base(c.tables.firsts[uint64_t{peer} * c.tables.chunks], total),
                         pack_word(operation.epoch, 0));
        if (is_remote(c.reach, peer)) {
            put_value_and_raise(ctx, c.reach, peer, c.outbox.totals.offset + 8 * uint64_t{c.rank}, total,
                                raise_of(c.reach, Signal::kTotals, peer, operation.epoch));
        }
    }
}

// Numbers the rows of a column: 0 has all received rows, 1 + e those of local expert e, and behind these each rank has
// one with the rows that it is sent. One warp.
CROSSDOCK_DEVICE void number_column(const Ctx& ctx, const HtCommon& c, const Operation& operation,
                                    const UpdateShared& shared, uint32_t column) {
    const HtTables& t = c.tables;
    const uint32_t received = 1 + c.arena.experts_per_rank;
    const bool is_sent = column >= received;
    uint32_t chunks = 1;  // of the source with most; the first entry of a source without tokens says where its would be
    CROSSDOCK_ROLLED
    for (uint32_t source = 0; source < c.arena.num_ranks; ++source) {
        const uint32_t some = num_chunks(is_sent ? c.num_tokens : shared.tokens[source]);
        chunks = some > chunks ? some : chunks;
    }
    const uint64_t peer = column - received;
    const uint64_t first = uint64_t{column} * c.arena.num_ranks * t.chunks;
    const uint32_t* masks = is_sent ? t.sent_masks + peer * t.chunks : t.masks + first;
    uint32_t* firsts = is_sent ? t.sent_firsts + peer * (t.chunks + 1) : t.firsts + first;
    const uint32_t total = number_entries(ctx, masks, firsts, is_sent ? 1 : c.arena.num_ranks, chunks,
                                          [&](uint32_t source, uint32_t chunk) {
                                              const uint32_t tokens = is_sent ? c.num_tokens : shared.tokens[source];
                                              return Entry{source * t.chunks + chunk, chunk < num_chunks(tokens)};
                                          });
    if (is_leader(ctx)) {
        uint32_t* end = is_sent ? firsts + num_chunks(c.num_tokens) : t.expert_rows + (column - 1);
        *(column == 0 ? &t.routing->num_rows : end) = total;
    }
    // Flat layouts: the bases leave now. Column 0 is the last of its warp's, because stores to other ranks delay those
    // behind them.
    if (column > 0 || c.expert_major) return;
    ctx.warp_sync();
    send_bases(ctx, c, operation, total, ctx.lane(), kLanes);
}

// ---- what the caller wants to know ----

// Flat rows of a local expert within the budget.
CROSSDOCK_DEVICE uint32_t rows_within_budget(const HtCommon& c, const uint32_t* source_tokens, uint32_t expert) {
    const HtTables& t = c.tables;
    const uint64_t column = uint64_t{c.arena.num_ranks} * t.chunks * (uint64_t{1} + expert);
    // The chunk that holds the first row beyond; before it, all rows count.
    CROSSDOCK_ROLLED
    for (uint32_t source = 0; source < c.arena.num_ranks; ++source) {
        CROSSDOCK_ROLLED
        for (uint32_t chunk = 0; chunk < num_chunks(source_tokens[source]); ++chunk) {
            const uint64_t entry = uint64_t{source} * t.chunks + chunk;
            const uint32_t mask = t.masks[entry];
            const uint32_t first = t.firsts[entry];
            if (first + number_of_ones(mask) <= c.budget) continue;
            uint32_t inside = 0;
            CROSSDOCK_ROLLED
            for (uint32_t bit = 0; bit < kChunkTokens; ++bit) {
                if (first + ones_below(mask, bit) < c.budget) inside |= 1u << bit;
            }
            return t.firsts[column + entry] + number_of_ones(t.masks[column + entry] & inside);
        }
    }
    return t.expert_rows[expert];
}

// The zones' first slots and the totals. Returns what comes in all. One warp.
CROSSDOCK_DEVICE uint32_t lay_out_zones(const Ctx& ctx, const HtUpdateArgs& args, const Operation& operation) {
    const HtCommon& c = args.common;
    const HtTables& t = c.tables;
    constexpr uint32_t kRun = 8;  // experts of a lane at once, whose rows come together
    const uint32_t experts = c.arena.experts_per_rank;
    uint32_t slots = 0;
    CROSSDOCK_ROLLED
    for (uint32_t base = 0; base < experts; base += kLanes * kRun) {
        const uint32_t first = base + ctx.lane() * kRun;
        uint32_t padded[kRun];
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kRun; ++i) padded[i] = first + i < experts ? t.expert_rows[first + i] : 0;
        uint32_t sum = 0;
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kRun; ++i) {
            padded[i] = (padded[i] + args.alignment - 1) / args.alignment * args.alignment;
            sum += padded[i];
        }
        uint32_t zone = slots + ctx.warp_sum_before(sum);
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kRun; ++i) {
            if (first + i < experts) t.zones[first + i] = zone;
            zone += padded[i];
        }
        slots += ctx.warp_sum(sum);
    }
    const uint32_t total = c.expert_major ? slots : t.routing->num_rows;
    if (is_leader(ctx)) {
        t.zones[c.arena.experts_per_rank] = slots;
        t.routing->magic = kHtRoutingMagic;
        t.routing->topk = c.topk;
        t.routing->alignment = args.alignment;
        t.routing->num_tokens = c.num_tokens;
        t.routing->total = total;
        t.routing->cleans = args.cleans;
        t.routing->dropped = 0;
        t.routing->maker = args.maker;
        t.routing->update = operation.epoch;
    }
    ctx.warp_sync();
    return total;
}

// Counters as the contract wants them, from the tables; also on behalf of a dispatch. One block.
CROSSDOCK_DEVICE void write_counters(const Ctx& ctx, const HtCommon& c, const HtCounters& counters, uint32_t total) {
    const HtTables& t = c.tables;
    const bool overflows = total > c.budget;
    CROSSDOCK_ROLLED
    for (uint32_t expert = thread_idx(ctx); expert < c.arena.experts_per_rank; expert += num_threads(ctx)) {
        uint32_t count = t.expert_rows[expert];
        if (c.expert_major) {
            const uint32_t zone = t.zones[expert] < c.budget ? t.zones[expert] : c.budget;
            const uint32_t end = t.zones[expert + 1] < c.budget ? t.zones[expert + 1] : c.budget;
            count = end - zone;
            write_counter(counters.offsets, counters.are_64_bit, expert, zone);
        } else if (overflows && counters.experts != nullptr) {
            count = rows_within_budget(c, t.source_tokens, expert);
        }
        write_counter(counters.experts, counters.are_64_bit, expert, count);
    }
    if (thread_idx(ctx) == 0) write_counter(counters.total, counters.total_is_64_bit, 0, total);
}

// ---- the end: one block ----

// Pairs of an own token and a rank that is masked, but hosts one of the token's experts. One block.
CROSSDOCK_DEVICE_RARE void count_dropped(const Ctx& ctx, const HtCommon& c) {
    const HtTables& t = c.tables;
    const int32_t experts = static_cast<int32_t>(c.arena.experts_per_rank);
    uint64_t dropped = 0;
    CROSSDOCK_ROLLED
    for (uint32_t peer = 0; peer < c.arena.num_ranks; ++peer) {
        if (is_active(ctx, c.scope, peer)) continue;
        const int32_t first = static_cast<int32_t>(peer) * experts;
        CROSSDOCK_ROLLED
        for (uint32_t token = thread_idx(ctx); token < c.num_tokens; token += num_threads(ctx)) {
            bool goes_there = false;
            CROSSDOCK_ROLLED
            for (uint32_t k = 0; k < c.topk; ++k) {
                const int32_t id = t.ids[uint64_t{token} * c.topk + k];
                goes_there = goes_there || (id >= first && id < first + experts);
            }
            if (goes_there) ++dropped;
        }
    }
    if (dropped > 0) ctx.add_relaxed_device(&t.routing->dropped, dropped);
}

// With that base the rows of a route are among those that can come to the LSA peer at all.
CROSSDOCK_DEVICE bool is_base_possible(const Ctx& ctx, const HtCommon& c, const Operation& operation, uint32_t route,
                                       uint32_t peer, uint32_t base) {
    const uint64_t most = uint64_t{c.arena.num_ranks} * c.arena.max_tokens - rows_of_route(c, route, c.num_tokens);
    if (base <= most) return true;
    refuse_number(ctx, c, operation, PeerNumber::kBase, peer, most, base);
    return false;
}

// Waits for the number of a route's first row at its receiver. One thread.
CROSSDOCK_DEVICE void learn_base(const Ctx& ctx, const HtUpdateArgs& args, const Operation& operation, uint32_t route) {
    const HtCommon& c = args.common;
    const HtTables& t = c.tables;
    const uint32_t peer = first_of_team(c) + route % team_size(c);  // in one team the route itself
    uint64_t base = 0;
    const bool came =
        is_active(ctx, c.scope, peer) &&
        wait_tagged_word(ctx, c, operation, WaitStep::kRouting, peer, base_word(c, c.rank, route), base) &&
        is_base_possible(ctx, c, operation, route, peer, static_cast<uint32_t>(base));
    t.bases[route] = came ? static_cast<uint32_t>(base) : 0;
    const uint32_t their_total = static_cast<uint32_t>(base >> 32);
    if (came && !args.drops && their_total > c.budget) record_overflow(ctx, c.scope, peer, their_total, c.budget);
    if (is_remote(c.reach, route)) learn_gin_total(ctx, args, operation, route);
    if (came) return;
    // Nothing goes to who is lost.
    CROSSDOCK_ROLLED
    for (uint32_t chunk = 0; chunk < num_chunks(c.num_tokens); ++chunk) t.sent_masks[route * t.chunks + chunk] = 0;
}

// Different warps lay out zones, write counters and wait for bases, so that their memory latencies overlap.
CROSSDOCK_DEVICE void finish_update(const Ctx& ctx, const HtUpdateArgs& args, const Operation& operation,
                                    const UpdateShared& shared) {
    const HtCommon& c = args.common;
    const HtTables& t = c.tables;
    if (c.scope.masking != 0) {
        for_threads(ctx, c.arena.num_ranks, [&](uint32_t i) { t.source_tokens[i] = shared.tokens[i]; });
        ctx.block_sync();
    }
    uint32_t total = t.routing->num_rows;
    if (ctx.warp_idx() == ctx.num_warps() / 2) {
        total = lay_out_zones(ctx, args, operation);
        if (c.expert_major) send_bases(ctx, c, operation, total, ctx.lane(), kLanes);
    }
    if (c.expert_major) {
        ctx.block_sync();
        total = t.routing->total;
    }
    write_counters(ctx, c, args.counters, total);
    CROSSDOCK_ROLLED
    for (uint32_t i = num_threads(ctx) - 1 - thread_idx(ctx); i < c.arena.num_ranks; i += num_threads(ctx))
        learn_base(ctx, args, operation, i);
    if (c.scope.masking != 0) {
        ctx.block_sync();
        count_dropped(ctx, c);
    }
    if (thread_idx(ctx) == 0 && args.host_total != nullptr)
        ctx.store_release_system(args.host_total, args.update_number << 32 | total);
}

CROSSDOCK_DEVICE void ht_update(const Ctx& ctx, const HtUpdateArgs& args) {
    const HtCommon& c = args.common;
    const uint32_t num_ranks = c.arena.num_ranks;
    ctx.wait_for_previous_kernels();
    const UpdateShared shared = UpdateShared::of(ctx, c);
    const uint32_t first_chunk = warp_of_grid(ctx);
    Choices choices{};  // the lane's in the warp's first chunk, which come while the block waits for its peers
    const Operation operation = begin_operation(ctx, c, [&] {
        CROSSDOCK_ROLLED
        for (uint32_t chunk = first_chunk; chunk < num_chunks(c.num_tokens); chunk += warps_of_grid(ctx))
            keep_choices(ctx, args, chunk);
        choices = held_choices(ctx, c, first_chunk);
    });
    // Peers may still read the bitmaps of the operation before, which are in the other half: no need to wait for them.
    CROSSDOCK_ROLLED
    for (uint32_t chunk = first_chunk; chunk < num_chunks(c.num_tokens); chunk += warps_of_grid(ctx)) {
        if (chunk != first_chunk) choices = held_choices(ctx, c, chunk);
        announce_chunk(ctx, c, operation, chunk, choices);
    }
    for_threads(ctx, c.arena.num_ranks, [&](uint32_t source) { shared.tokens[source] = 0; });
    const auto hear = [&](uint32_t source, uint64_t told) {
        shared.tokens[source] = expect_tokens(ctx, c, operation, source, told);
    };
    if (!wait_all_entered(ctx, c, operation, shared.peers, true, hear)) return;
    if constexpr (kHasGinPeers) {
        announce_to_gin_peers(ctx, args, operation, shared.peers);
        hear_gin_peers(ctx, c, operation, hear);
    }
    for_threads(ctx, c.arena.num_ranks, [&](uint32_t source) {
        ctx.store_relaxed_device(c.tables.source_tokens + source, shared.tokens[source]);
    });
    CROSSDOCK_ROLLED
    for (uint32_t i = warp_of_grid(ctx); i < c.arena.num_ranks * c.tables.chunks; i += warps_of_grid(ctx)) {
        const uint32_t source = i % c.arena.num_ranks;
        const uint32_t chunk = i / c.arena.num_ranks;
        if (chunk < num_chunks(shared.tokens[source]))
            receive_chunk(ctx, args, operation, source, chunk, shared.tokens[source]);
    }
    const bool met = meet_blocks(ctx, c, operation);
    // Blocks may have lost a source at different moments; from here on they agree. None goes on with another number
    // than the others, which only a word that has changed meanwhile can have told.
    CROSSDOCK_ROLLED
    for (uint32_t source = thread_idx(ctx); source < num_ranks; source += num_threads(ctx)) {
        const uint32_t agreed = ctx.load_relaxed_device(c.tables.source_tokens + source);
        if (!is_active(ctx, c.scope, source)) {
            shared.tokens[source] = 0;
        } else if (shared.tokens[source] != agreed) {
            refuse_number(ctx, c, operation, PeerNumber::kTokens, source, agreed, shared.tokens[source]);
            fail_group(ctx, c.scope, &c.scope.status->fault.claimed);  // with masks, too
            shared.tokens[source] = 0;
        }
    }
    ctx.block_sync();
    const uint32_t columns = 1 + c.arena.experts_per_rank + c.arena.num_ranks;
    CROSSDOCK_ROLLED
    for (uint32_t i = warp_of_grid(ctx); met && i < columns + num_crossing_tasks(c); i += warps_of_grid(ctx)) {
        if (i < columns) {
            number_column(ctx, c, operation, shared, columns - 1 - i);
        } else {
            number_crossing(ctx, c, operation, shared, i - columns);
        }
    }
    if (is_last_block(ctx, c) && met) finish_update(ctx, args, operation, shared);
}

}  // namespace
}  // namespace crossdock
