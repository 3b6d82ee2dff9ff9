// SPDX-License-Identifier: Apache-2.0
// High throughput: what travels behind a row of an elastic operation (crossdock.h), in words of 4 bytes. In a dispatch:
// the token's global expert ids by column (-1: none), then its routing weights by column, if they travel, then its
// scales. In a combine: the weights that return, by column, 0 for experts of other ranks; they come before rows of
// choices (HtWire::kChoices), whose number differs. Who sends a row gathers the words from where the caller has them,
// and who receives it writes them where the caller wants them.
#pragma once

#include "device/row_copy.h"
#include "kernels/ht/operation.h"

namespace crossdock {
namespace {

// ---- columns ----

// A column of a token's choices whose expert is on this rank.
struct LocalChoice {
    bool exists;
    uint32_t expert;  // as this rank numbers its own
    uint32_t order;   // among the token's experts here, in ascending order

    // bitmap: of the token. What its source says elsewhere does not count.
    CROSSDOCK_DEVICE static LocalChoice of(const HtCommon& c, const uint64_t* bitmap, int32_t id) {
        const uint32_t expert = static_cast<uint32_t>(id) - c.rank * c.arena.experts_per_rank;
        if (id < 0 || expert >= c.arena.experts_per_rank) return {false, 0, 0};
        const uint64_t own = uint64_t{1} << expert % 64;
        if ((bitmap[expert / 64] & own) == 0) return {false, 0, 0};
        uint32_t order = number_of_ones(bitmap[expert / 64] & (own - 1));
        CROSSDOCK_ROLLED
        for (uint32_t w = 0; w < expert / 64; ++w) order += number_of_ones(bitmap[w]);
        return {true, expert, order};
    }
    // What a dispatch has kept of a column; row: number of the token's row.
    CROSSDOCK_DEVICE static LocalChoice kept(const HtCommon& c, const uint64_t* bitmap, uint32_t row, uint32_t column) {
        const uint32_t order = c.tables.columns[uint64_t{row} * c.topk + column];
        uint32_t expert = 0;
        const bool exists = order != kNoColumn && find_expert(c, bitmap, order, expert);
        return {exists, expert, order};
    }
};

// As list_slots, but in the order of the token's columns. Expert-major. One lane.
CROSSDOCK_DEVICE uint32_t list_slots_by_column(const HtCommon& c, uint32_t source, uint32_t chunk, uint32_t bit,
                                               uint32_t row, uint64_t limit, uint32_t* slots) {
    const uint64_t* bitmap = bitmap_of(c, source, chunk * kChunkTokens + bit);
    uint64_t listed = 0;
    uint32_t experts = 0;
    CROSSDOCK_ROLLED
    for (uint32_t column = 0; column < c.topk; ++column) {
        const LocalChoice choice = LocalChoice::kept(c, bitmap, row, column);
        if (!choice.exists || (listed >> choice.order % 64 & 1) != 0) continue;
        listed |= uint64_t{1} << choice.order % 64;
        slots[experts++] = choice.expert;
    }
    // Apart, since a look-up takes long and lanes have experts in different columns.
    uint32_t num = 0;
    CROSSDOCK_ROLLED
    for (uint32_t i = 0; i < experts; ++i) {
        const uint32_t slot = slot_of(c, slots[i], source, chunk, bit);
        if (slot < c.budget && slot < limit) slots[num++] = slot;
    }
    return num;
}

// ---- dispatch ----

// One warp. The words behind the row of an own token.
CROSSDOCK_DEVICE void gather_words(const Ctx& ctx, const HtElasticDispatchArgs& args, uint32_t token, std::byte* to) {
    const HtCommon& c = args.common;
    const ElasticDispatchArgs& elastic = args.elastic;
    const uint32_t scales = c.topk * (elastic.with_weights ? 2 : 1);
    uint32_t* const words = reinterpret_cast<uint32_t*>(to);
    for_lanes(ctx, args.scale_bytes / 4, [&](uint32_t i) {
        uint32_t word = 0;
        if (i < c.topk) {
            word = static_cast<uint32_t>(c.tables.ids[uint64_t{token} * c.topk + i]);
        } else if (i < scales) {
            word = bits_of(elastic.topk_weights[uint64_t{token} * c.topk + (i - c.topk)]);
        } else if (i < scales + elastic.num_scales) {
            word = *elastic.scales.at(token, i - scales);
        }
        words[i] = word;
    });
}

// The weight of a column's expert: of all columns that name it, if this is the first one.
CROSSDOCK_DEVICE bool weight_of_expert(const uint32_t* words, uint32_t topk, uint32_t column, float& weight) {
    CROSSDOCK_ROLLED
    for (uint32_t k = 0; k < column; ++k) {
        if (words[k] == words[column]) return false;
    }
    weight = float_of(words[topk + column]);
    CROSSDOCK_ROLLED
    for (uint32_t k = column + 1; k < topk; ++k) {
        if (words[k] == words[column]) weight += float_of(words[topk + k]);
    }
    return true;
}

// One warp. Writes the words of received row `row`, and where it comes from, to their places. slots: its places, from
// list_slots: slots ascend with their experts, so those beyond the budget are the last ones.
CROSSDOCK_DEVICE void place_words(const Ctx& ctx, const HtElasticDispatchArgs& args, uint32_t source, uint32_t token,
                                  uint32_t row, const std::byte* from, const uint32_t* slots, uint32_t num_slots) {
    const HtCommon& c = args.common;
    const ElasticDispatchArgs& elastic = args.elastic;
    const uint32_t topk = c.topk;
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(from);
    const uint64_t* const bitmap = bitmap_of(c, source, token);
    int32_t* const origin = row < elastic.source_rows ? elastic.sources : nullptr;
    for_lanes(ctx, topk, [&](uint32_t k) {
        const LocalChoice choice = LocalChoice::of(c, bitmap, static_cast<int32_t>(words[k]));
        const uint64_t at = uint64_t{row} * topk + k;
        c.tables.columns[at] = choice.exists ? static_cast<uint8_t>(choice.order) : kNoColumn;
        int32_t slot = -1;
        if (c.expert_major && choice.exists && choice.order < num_slots)
            slot = static_cast<int32_t>(slots[choice.order]);
        if (origin != nullptr) {
            int32_t* const line = origin + uint64_t{row} * (topk + 2);
            if (k == 0) {
                line[0] = static_cast<int32_t>(source * elastic.origin_stride + token);
                line[1] = static_cast<int32_t>(row);
            }
            line[2 + k] = slot;
        }
        if (c.expert_major) {
            float weight = 0.0f;
            if (slot >= 0 && elastic.out_weights != nullptr && weight_of_expert(words, topk, k, weight))
                elastic.out_weights[slot] = weight;
            return;
        }
        if (row >= elastic.rows) return;
        const bool is_wanted = choice.exists || !elastic.own_weights_only;
        if (elastic.out_weights != nullptr) elastic.out_weights[at] = is_wanted ? float_of(words[topk + k]) : 0.0f;
        const int32_t id = choice.exists ? static_cast<int32_t>(choice.expert) : -1;
        if (elastic.out_topk_idx == nullptr) return;
        if (elastic.ids_are_64_bit) {
            static_cast<int64_t*>(elastic.out_topk_idx)[at] = id;
        } else {
            static_cast<int32_t*>(elastic.out_topk_idx)[at] = id;
        }
    });
    const uint32_t* const scales = words + topk * (elastic.with_weights ? 2 : 1);
    for_lanes(ctx, num_slots == 0 ? 0 : elastic.num_scales, [&](uint32_t i) {
        const uint32_t scale = scales[i];
        CROSSDOCK_ROLLED
        for (uint32_t n = 0; n < num_slots; ++n) *elastic.out_scales.at(slots[n], i) = scale;
    });
}

// How many rows of the outputs received rows need.
CROSSDOCK_DEVICE uint32_t rows_needed(const HtCommon& c) {
    const HtTables& t = c.tables;
    uint32_t end = t.routing->num_rows;
    if (c.expert_major) {
        end = 0;
        CROSSDOCK_ROLLED
        for (uint32_t expert = c.arena.experts_per_rank; expert > 0 && end == 0; --expert) {
            const uint32_t rows = t.expert_rows[expert - 1];
            if (rows > 0) end = t.zones[expert - 1] + rows;
        }
    }
    return end < c.budget ? end : c.budget;
}

// All blocks, at the end. The group fails if tensors have fewer rows than came, once nobody needs this rank any more.
// source_rows: of a tensor with a row per received token.
CROSSDOCK_DEVICE void expect_room(const Ctx& ctx, const HtCommon& c, uint32_t rows, uint32_t source_rows) {
    const HtTables& t = c.tables;
    const uint32_t most = c.expert_major ? t.zones[c.arena.experts_per_rank] : t.routing->num_rows;
    if (most <= rows && t.routing->num_rows <= source_rows) return;
    if (!is_last_block(ctx, c) || thread_idx(ctx) != 0) return;
    const uint32_t needed = rows_needed(c);
    const uint32_t tokens = t.routing->num_rows < c.budget || c.expert_major ? t.routing->num_rows : c.budget;
    if (needed > rows) {
        record_overflow(ctx, c.scope, c.rank, needed, rows);
    } else if (tokens > source_rows) {
        record_overflow(ctx, c.scope, c.rank, tokens, source_rows);
    }
}

// One warp. What the caller wants to know of all rows.
CROSSDOCK_DEVICE void write_ends(const Ctx& ctx, const HtElasticDispatchArgs& args) {
    const HtCommon& c = args.common;
    const HtTables& t = c.tables;
    const ElasticDispatchArgs& elastic = args.elastic;
    for_lanes(ctx, elastic.rank_ends == nullptr ? 0 : c.arena.num_ranks, [&](uint32_t rank) {
        const bool is_last = rank + 1 == c.arena.num_ranks;
        elastic.rank_ends[rank] =
            static_cast<int32_t>(is_last ? t.routing->num_rows : t.firsts[(uint64_t{rank} + 1) * t.chunks]);
    });
    const uint32_t experts = c.arena.experts_per_rank;
    uint32_t before = 0;  // padded rows of the experts before
    CROSSDOCK_ROLLED
    for (uint32_t base = 0; base < experts; base += kLanes) {
        const uint32_t expert = base + ctx.lane();
        const uint32_t count = expert < experts ? t.expert_rows[expert] : 0;
        const uint32_t padded = static_cast<uint32_t>(align_up(count, elastic.alignment));
        const uint32_t first = before + ctx.warp_sum_before(padded);
        before += ctx.warp_sum(padded);
        if (expert >= experts) continue;
        if (elastic.expert_counts != nullptr) elastic.expert_counts[expert] = static_cast<int32_t>(count);
        if (elastic.statistics != nullptr) {
            const uint32_t sum = static_cast<uint32_t>(elastic.statistics[expert]) + count;
            elastic.statistics[expert] = static_cast<int32_t>(sum);
        }
        if (elastic.expert_ends != nullptr)
            elastic.expert_ends[expert] =
                static_cast<int32_t>(c.expert_major ? t.zones[expert] + count : first + padded);
    }
}

// warp: of all warps of the grid that do this. What no row writes: numbers of rows, ids beyond the last row, padding.
CROSSDOCK_DEVICE void write_rest(const Ctx& ctx, const HtElasticDispatchArgs& args, uint32_t warp, uint32_t warps) {
    const HtCommon& c = args.common;
    const HtTables& t = c.tables;
    const ElasticDispatchArgs& elastic = args.elastic;
    if (warp == 0) write_ends(ctx, args);
    CROSSDOCK_ROLLED
    for (uint32_t expert = 0; elastic.zero_padding && expert < c.arena.experts_per_rank; ++expert) {
        uint32_t end = t.zones[expert + 1] < c.budget ? t.zones[expert + 1] : c.budget;
        if (end > elastic.rows) end = elastic.rows;
        CROSSDOCK_ROLLED
        for (uint32_t slot = t.zones[expert] + t.expert_rows[expert] + warp; slot < end; slot += warps) {
            zero_row(ctx, args.out_tokens + uint64_t{slot} * args.row_bytes, args.row_bytes);
            for_lanes(ctx, elastic.num_scales, [&](uint32_t i) { *elastic.out_scales.at(slot, i) = 0; });
            if (elastic.out_weights != nullptr && is_leader(ctx)) elastic.out_weights[slot] = 0.0f;
        }
    }
    if (elastic.out_topk_idx == nullptr) return;
    const uint64_t end = uint64_t{elastic.rows} * c.topk;
    CROSSDOCK_ROLLED
    for (uint64_t at = uint64_t{rows_needed(c)} * c.topk + warp * kLanes + ctx.lane(); at < end;
         at += uint64_t{warps} * kLanes) {
        if (elastic.ids_are_64_bit) {
            static_cast<int64_t*>(elastic.out_topk_idx)[at] = -1;
        } else {
            static_cast<int32_t*>(elastic.out_topk_idx)[at] = -1;
        }
    }
}

// ---- combine ----

// Column `column` of the weights of received row `row`.
CROSSDOCK_DEVICE uint32_t weight_to_return(const HtElasticCombineArgs& args, uint32_t source, uint32_t token,
                                           uint32_t row, uint32_t column) {
    const HtCommon& c = args.common;
    const LocalChoice choice = LocalChoice::kept(c, bitmap_of(c, source, token), row, column);
    if (!choice.exists) return 0;
    const uint64_t at =
        c.expert_major ? slot_of(c, choice.expert, source, token / kChunkTokens, token % kChunkTokens) : row;
    if (at >= c.budget || at >= args.elastic.rows) return 0;
    return bits_of(args.elastic.weights[c.expert_major ? at : at * c.topk + column]);
}

// One warp. The words that return with a row. All lanes have written theirs when it ends.
CROSSDOCK_DEVICE void return_words(const Ctx& ctx, const HtElasticCombineArgs& args, const PlannedRow& row,
                                   std::byte* to) {
    if (args.weight_bytes == 0) return;
    uint32_t* const words = reinterpret_cast<uint32_t*>(to);
    for_lanes(ctx, args.common.topk, [&](uint32_t column) {
        words[column] = weight_to_return(args, row.peer, row.chunk * kChunkTokens + row.bit, row.number, column);
    });
    ctx.warp_sync();
}

// Adds the tensors that a sum begins with to a plan of its rows. Returns their number. One warp, before a warp barrier.
CROSSDOCK_DEVICE uint32_t note_biases(const Ctx& ctx, const HtElasticCombineArgs& args, const HtPlan& plan,
                                      uint32_t token) {
    uint32_t num = 0;
    CROSSDOCK_UNROLL
    for (uint32_t i = 0; i < kMostBiases; ++i) {
        if (args.elastic.bias[i] == nullptr) continue;
        if (is_leader(ctx)) plan.rows[num] = args.elastic.bias[i] + uint64_t{token} * args.row_bytes;
        ++num;
    }
    return num;
}

}  // namespace
}  // namespace crossdock
