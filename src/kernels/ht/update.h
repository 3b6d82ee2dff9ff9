// SPDX-License-Identifier: Apache-2.0
// High-throughput routing update: one kernel. Every rank tells every peer which of the peer's experts its tokens go to
// (a bitmap per token, in words that announce themselves); the receiver numbers what will come, in order (source,
// token), and tells each source where its rows begin. Nothing of it depends on who was faster. contract: nccl_ep.h,
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
    for (uint32_t base = static_cast<uint32_t>(ctx.lane()); base < num * c.topk; base += kLanes * Choices::kMost) {
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
CROSSDOCK_DEVICE bool are_choices_held(const HtCommon& c) {
    return kLanes >= static_cast<int>(kChunkTokens) && c.topk <= Choices::kMost;
}
CROSSDOCK_DEVICE Choices held_choices(const Ctx& ctx, const HtCommon& c, uint32_t chunk) {
    const uint32_t token = chunk * kChunkTokens + static_cast<uint32_t>(ctx.lane());
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
CROSSDOCK_DEVICE void announce_chunk(const Ctx& ctx, const HtUpdateArgs& args, const Operation& operation,
                                     uint32_t chunk, const uint32_t* peers, Choices choices) {
    const HtCommon& c = args.common;
    const HtTables& t = c.tables;
    const uint32_t first = chunk * kChunkTokens;
    const uint32_t num = c.num_tokens - first < kChunkTokens ? c.num_tokens - first : kChunkTokens;
    const int32_t experts = static_cast<int32_t>(c.arena.experts_per_rank);
    const uint64_t tag = pack_word(operation.epoch, 0);
    const bool are_held = are_choices_held(c);
    CROSSDOCK_ROLLED
    for (uint32_t i = 0; i < c.arena.num_ranks; ++i) {
        const uint32_t peer = (static_cast<uint32_t>(c.rank) + i) % c.arena.num_ranks;
        uint32_t mask = 0;
        CROSSDOCK_ROLLED
        for (uint32_t bit = static_cast<uint32_t>(ctx.lane()); peers[peer] != kAbsent && bit < num; bit += kLanes) {
            TaggedWord* words = outgoing_bitmap_words(c, static_cast<int>(peer), first + bit);
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
                if (is_remote(c.reach, static_cast<int>(peer)))
                    in_own_arena<uint32_t>(c, c.outbox.sent_masks)[peer * t.chunks + chunk] = mask;
            }
        }
    }
}

// ---- receive ----

// How many tokens a source has; 0: it is lost, or has said nonsense. LSA peers have told it when they entered. What a
// GIN peer has put is here when that is known. The calling lane.
CROSSDOCK_DEVICE uint32_t wait_tokens(const Ctx& ctx, const HtCommon& c, const Operation& operation, int source,
                                      const uint32_t* peers) {
    if (source == c.rank) return c.num_tokens;
    uint64_t tokens = 0;
    if (is_remote(c.reach, source)) {
        if (is_active(ctx, c.scope, source) &&
            wait_gin_peer(ctx, c, operation, WaitStep::kCounts, Signal::kData, source))
            tokens = in_own_arena<uint64_t>(c, c.outbox.tokens)[source];
    } else if (peers[source] != kAbsent) {
        tokens = word_payload(ctx.load_tagged(terms_word(c, operation, c.rank, source)).tag);
    }
    if (tokens <= c.arena.max_tokens) return static_cast<uint32_t>(tokens);
    refuse_number(ctx, c, operation, PeerNumber::kTokens, source, c.arena.max_tokens, tokens);
    return 0;
}

// Experts among those of one word of a bitmap.
CROSSDOCK_DEVICE uint32_t experts_of_word(const HtCommon& c, uint32_t word) {
    const uint32_t left = c.arena.experts_per_rank - 64 * word;
    return left < 64 ? left : 64;
}

// The experts of a token among those of one word, as its source has told; 0: it is lost, or has said nonsense. seen:
// the word as it was looked at. The calling lane.
CROSSDOCK_DEVICE uint64_t take_bitmap(const Ctx& ctx, const HtCommon& c, const Operation& operation, int source,
                                      const TaggedWord* word, const TaggedWord& seen, uint32_t experts,
                                      uint32_t word_idx) {
    uint64_t bits = seen.payload;
    if (word_epoch(seen.tag) != operation.epoch &&
        !wait_tagged_word(ctx, c, operation, WaitStep::kRouting, source, word, bits))
        return 0;
    if (experts == 64 || bits >> experts == 0) return bits;
    refuse_number(ctx, c, operation, PeerNumber::kExpert, source, c.arena.experts_per_rank - 1,
                  64 * word_idx + experts + lowest_one(bits >> experts));
    return 0;
}

// A chunk of a source's tokens: keeps their bitmaps, and for each local expert which of the tokens come. What is kept
// is what was judged: the words are looked at once. One warp.
CROSSDOCK_DEVICE void receive_chunk(const Ctx& ctx, const HtUpdateArgs& args, const Operation& operation, int source,
                                    uint32_t chunk, uint32_t tokens) {
    constexpr uint32_t kWordsAtOnce = kLanes > 1 ? 4 : 1;  // on their way together
    const HtCommon& c = args.common;
    const HtTables& t = c.tables;
    const uint32_t first = chunk * kChunkTokens;
    const uint32_t num = tokens - first < kChunkTokens ? tokens - first : kChunkTokens;
    const uint64_t entry = static_cast<uint32_t>(source) * t.chunks + chunk;
    const uint64_t column = uint64_t{c.arena.num_ranks} * t.chunks;
    uint64_t* bitmaps = t.bitmaps + (static_cast<uint64_t>(source) * c.arena.max_tokens + first) * t.words;
    // On GPUs a lane has one token, and what it keeps of few experts stays in registers.
    const bool is_held = kLanes >= static_cast<int>(kChunkTokens) && t.words <= kWordsAtOnce;
    uint64_t held[kWordsAtOnce] = {};
    uint32_t rows = 0;
    CROSSDOCK_ROLLED
    for (uint32_t bit = static_cast<uint32_t>(ctx.lane()); bit < num; bit += kLanes) {
        uint32_t choices = 0;
        CROSSDOCK_ROLLED
        for (uint32_t base = 0; base < t.words; base += kWordsAtOnce) {
            const TaggedWord* words = bitmap_words(c, c.rank, source, first + bit) + base;
            TaggedWord seen[kWordsAtOnce] = {};
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kWordsAtOnce; ++i) {
                if (base + i < t.words) seen[i] = ctx.load_tagged(words + i);
            }
            CROSSDOCK_UNROLL
            for (uint32_t i = 0; i < kWordsAtOnce; ++i) {
                if (base + i >= t.words) continue;
                const uint64_t bits =
                    take_bitmap(ctx, c, operation, source, words + i, seen[i], experts_of_word(c, base + i), base + i);
                bitmaps[bit * t.words + base + i] = held[i] = bits;
                choices += static_cast<uint32_t>(number_of_ones(bits));
            }
        }
        if (choices > c.topk) {
            refuse_number(ctx, c, operation, PeerNumber::kExpertsOfToken, source, c.topk, choices);
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
            const uint32_t bit = of_lane + static_cast<uint32_t>(ctx.lane());
            uint64_t own = held[0];
            CROSSDOCK_UNROLL
            for (uint32_t i = 1; i < kWordsAtOnce; ++i) own = i == w ? held[i] : own;
            if (!is_held) own = bit < num ? bitmaps[bit * t.words + w] : 0;
            mine |= ctx.warp_transpose(static_cast<uint32_t>(own >> base % 64)) << of_lane;
        }
        const uint32_t expert = base + static_cast<uint32_t>(ctx.lane());
        if (expert < c.arena.experts_per_rank) t.masks[(uint64_t{1} + expert) * column + entry] = mine;
    }
    rows = ctx.warp_or(rows);
    if (is_leader(ctx)) t.masks[entry] = rows;
}

// ---- numbering ----

CROSSDOCK_DEVICE void number_column(const Ctx& ctx, const HtCommon& c, const UpdateShared& shared, uint32_t column) {
    const HtTables& t = c.tables;
    uint32_t chunks = 1;  // of the source with most; the first entry of a source without tokens says where its would be
    CROSSDOCK_ROLLED
    for (uint32_t source = 0; source < c.arena.num_ranks; ++source) {
        const uint32_t some = num_chunks(shared.tokens[source]);
        chunks = some > chunks ? some : chunks;
    }
    const uint64_t first = uint64_t{column} * c.arena.num_ranks * t.chunks;
    const uint32_t total =
        number_entries(ctx, t.masks + first, t.firsts + first, c.arena.num_ranks * chunks, [&](uint32_t i) {
            const uint32_t source = i / chunks;
            return Entry{source * t.chunks + i % chunks, i % chunks < num_chunks(shared.tokens[source])};
        });
    if (!is_leader(ctx)) return;
    if (column == 0) {
        t.routing->num_rows = total;
    } else {
        t.expert_rows[column - 1] = total;
    }
}

CROSSDOCK_DEVICE void number_sent(const Ctx& ctx, const HtCommon& c, uint32_t peer) {
    const HtTables& t = c.tables;
    number_chunks(ctx, t.sent_masks + uint64_t{peer} * t.chunks, t.sent_firsts + uint64_t{peer} * (t.chunks + 1),
                  num_chunks(c.num_tokens));
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
            if (first + static_cast<uint32_t>(number_of_ones(mask)) <= c.budget) continue;
            uint32_t inside = 0;
            CROSSDOCK_ROLLED
            for (uint32_t bit = 0; bit < kChunkTokens; ++bit) {
                if (first + ones_below(mask, bit) < c.budget) inside |= 1u << bit;
            }
            return t.firsts[column + entry] + static_cast<uint32_t>(number_of_ones(t.masks[column + entry] & inside));
        }
    }
    return t.expert_rows[expert];
}

// The zones' first slots and the totals. One warp.
CROSSDOCK_DEVICE void lay_out_zones(const Ctx& ctx, const HtUpdateArgs& args, const Operation& operation) {
    const HtCommon& c = args.common;
    const HtTables& t = c.tables;
    constexpr uint32_t kRun = 8;  // experts of a lane at once, whose rows come together
    const uint32_t experts = c.arena.experts_per_rank;
    uint32_t slots = 0;
    CROSSDOCK_ROLLED
    for (uint32_t base = 0; base < experts; base += kLanes * kRun) {
        const uint32_t first = base + static_cast<uint32_t>(ctx.lane()) * kRun;
        uint32_t padded[kRun];
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kRun; ++i) padded[i] = first + i < experts ? t.expert_rows[first + i] : 0;
        uint32_t sum = 0;
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kRun; ++i) {
            padded[i] = (padded[i] + args.alignment - 1) / args.alignment * args.alignment;
            sum += padded[i];
        }
        uint32_t zone = slots + static_cast<uint32_t>(ctx.warp_sum_before(static_cast<int>(sum)));
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kRun; ++i) {
            if (first + i < experts) t.zones[first + i] = zone;
            zone += padded[i];
        }
        slots += static_cast<uint32_t>(ctx.warp_sum(static_cast<int>(sum)));
    }
    if (is_leader(ctx)) {
        t.zones[c.arena.experts_per_rank] = slots;
        t.routing->magic = kHtRoutingMagic;
        t.routing->topk = c.topk;
        t.routing->alignment = args.alignment;
        t.routing->num_tokens = c.num_tokens;
        t.routing->total = c.expert_major ? slots : t.routing->num_rows;
        t.routing->cleans = args.cleans;
        t.routing->dropped = 0;
        t.routing->maker = args.maker;
        t.routing->update = operation.epoch;
    }
    ctx.warp_sync();
}

// Counters as the contract wants them, from the tables; also on behalf of a dispatch. One block.
CROSSDOCK_DEVICE void write_counters(const Ctx& ctx, const HtCommon& c, const HtCounters& counters) {
    const HtTables& t = c.tables;
    const bool overflows = t.routing->total > c.budget;
    CROSSDOCK_ROLLED
    for (uint32_t expert = static_cast<uint32_t>(thread_idx(ctx)); expert < c.arena.experts_per_rank;
         expert += static_cast<uint32_t>(num_threads(ctx))) {
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
    if (thread_idx(ctx) == 0) write_counter(counters.total, counters.total_is_64_bit, 0, t.routing->total);
}

// ---- the end: one block ----

// Pairs of an own token and a rank that is masked, but hosts one of the token's experts. One block.
CROSSDOCK_DEVICE_RARE void count_dropped(const Ctx& ctx, const HtCommon& c) {
    const HtTables& t = c.tables;
    const int32_t experts = static_cast<int32_t>(c.arena.experts_per_rank);
    uint64_t dropped = 0;
    CROSSDOCK_ROLLED
    for (uint32_t peer = 0; peer < c.arena.num_ranks; ++peer) {
        if (is_active(ctx, c.scope, static_cast<int>(peer))) continue;
        const int32_t first = static_cast<int32_t>(peer) * experts;
        CROSSDOCK_ROLLED
        for (uint32_t token = static_cast<uint32_t>(thread_idx(ctx)); token < c.num_tokens;
             token += static_cast<uint32_t>(num_threads(ctx))) {
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

// With that base the rows of a lane are among those that can come to the LSA peer at all.
CROSSDOCK_DEVICE bool is_base_possible(const Ctx& ctx, const HtCommon& c, const Operation& operation, int lane,
                                       int peer, uint32_t base) {
    const uint64_t most = uint64_t{c.arena.num_ranks} * c.arena.max_tokens - rows_of_lane(c, lane);
    if (base <= most) return true;
    refuse_number(ctx, c, operation, PeerNumber::kBase, peer, most, base);
    return false;
}

CROSSDOCK_DEVICE void finish_update(const Ctx& ctx, const HtUpdateArgs& args, const Operation& operation,
                                    const UpdateShared& shared) {
    const HtCommon& c = args.common;
    const HtTables& t = c.tables;
    if (ctx.warp_idx() == 0) lay_out_zones(ctx, args, operation);
    CROSSDOCK_ROLLED
    for (uint32_t i = static_cast<uint32_t>(thread_idx(ctx)); i < c.arena.num_ranks;
         i += static_cast<uint32_t>(num_threads(ctx)))
        t.source_tokens[i] = shared.tokens[i];
    ctx.block_sync();
    const uint32_t total = t.routing->total;
    CROSSDOCK_ROLLED
    for (uint32_t i = static_cast<uint32_t>(thread_idx(ctx)); i < c.arena.num_ranks;
         i += static_cast<uint32_t>(num_threads(ctx))) {
        const int peer = static_cast<int>(i);
        if (!is_active(ctx, c.scope, peer)) continue;
        ctx.store_tagged(base_word(c, agent_of(c, peer), lane_of(c, peer, c.rank)),
                         pack_base(t.firsts[uint64_t{i} * t.chunks], total), pack_word(operation.epoch, 0));
        if (is_remote(c.reach, peer)) {
            put_value_and_raise(ctx, c.reach, peer, c.outbox.totals + 8 * static_cast<uint64_t>(c.rank), total,
                                raise_of(c.reach, Signal::kTotals, peer, operation.epoch));
        }
    }
    write_counters(ctx, c, args.counters);
    CROSSDOCK_ROLLED
    for (uint32_t i = static_cast<uint32_t>(thread_idx(ctx)); i < c.arena.num_ranks;
         i += static_cast<uint32_t>(num_threads(ctx))) {
        // The lane's: in one team the peer is rank i.
        const int peer = first_of_team(c) + static_cast<int>(i) % team_size(c);
        uint64_t base = 0;
        const bool came = is_active(ctx, c.scope, peer) &&
                          wait_tagged_word(ctx, c, operation, WaitStep::kRouting, peer,
                                           base_word(c, c.rank, static_cast<int>(i)), base) &&
                          is_base_possible(ctx, c, operation, static_cast<int>(i), peer, static_cast<uint32_t>(base));
        t.bases[i] = came ? static_cast<uint32_t>(base) : 0;
        const uint32_t their_total = static_cast<uint32_t>(base >> 32);
        if (came && !args.drops && their_total > c.budget) record_overflow(ctx, c.scope, peer, their_total, c.budget);
        if (is_remote(c.reach, static_cast<int>(i))) learn_gin_total(ctx, args, operation, static_cast<int>(i));
        if (came) continue;
        // Nothing goes to who is lost.
        CROSSDOCK_ROLLED
        for (uint32_t chunk = 0; chunk < num_chunks(c.num_tokens); ++chunk) t.sent_masks[i * t.chunks + chunk] = 0;
    }
    if (c.scope.masking != 0) {
        ctx.block_sync();
        count_dropped(ctx, c);
    }
    if (thread_idx(ctx) == 0 && args.host_total != nullptr)
        ctx.store_release_system(args.host_total, args.update_number << 32 | total);
}

CROSSDOCK_DEVICE void ht_update(const Ctx& ctx, const HtUpdateArgs& args) {
    const HtCommon& c = args.common;
    const int num_ranks = static_cast<int>(c.arena.num_ranks);
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
    wait_all_entered(ctx, c, operation, shared.peers, true);
    if (!block_goes_on(ctx, c)) return;

    CROSSDOCK_ROLLED
    for (uint32_t chunk = first_chunk; chunk < num_chunks(c.num_tokens); chunk += warps_of_grid(ctx)) {
        if (chunk != first_chunk) choices = held_choices(ctx, c, chunk);
        announce_chunk(ctx, args, operation, chunk, shared.peers, choices);
    }
    announce_to_gin_peers(ctx, args, operation, shared.peers);

    CROSSDOCK_ROLLED
    for (int source = thread_idx(ctx); source < num_ranks; source += num_threads(ctx)) {
        shared.tokens[source] = wait_tokens(ctx, c, operation, source, shared.peers);
        ctx.store_relaxed_device(c.tables.source_tokens + source, shared.tokens[source]);
    }
    ctx.block_sync();
    CROSSDOCK_ROLLED
    for (uint32_t i = warp_of_grid(ctx); i < c.arena.num_ranks * c.tables.chunks; i += warps_of_grid(ctx)) {
        const int source = static_cast<int>(i % c.arena.num_ranks);
        const uint32_t chunk = i / c.arena.num_ranks;
        if (chunk < num_chunks(shared.tokens[source]))
            receive_chunk(ctx, args, operation, source, chunk, shared.tokens[source]);
    }
    const bool met = meet_blocks(ctx, c, operation);
    // Blocks may have lost a source at different moments; from here on they agree. None goes on with another number
    // than the others, which only a word that has changed meanwhile can have told.
    CROSSDOCK_ROLLED
    for (int source = thread_idx(ctx); source < num_ranks; source += num_threads(ctx)) {
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
    const uint32_t columns = 1 + c.arena.experts_per_rank;
    CROSSDOCK_ROLLED
    for (uint32_t i = warp_of_grid(ctx); met && i < columns + c.arena.num_ranks + num_crossing_tasks(c);
         i += warps_of_grid(ctx)) {
        if (i < columns) {
            number_column(ctx, c, shared, i);
        } else if (i < columns + c.arena.num_ranks) {
            number_sent(ctx, c, i - columns);
        } else {
            number_crossing(ctx, c, operation, shared, i - columns - c.arena.num_ranks);
        }
    }
    if (is_last_block(ctx, c) && met) finish_update(ctx, args, operation, shared);
}

}  // namespace
}  // namespace crossdock
