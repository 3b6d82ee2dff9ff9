// SPDX-License-Identifier: Apache-2.0
// Places rows by expert. A block places the rows of some experts, on GPUs of one, and reads all pairs for that: so no
// block waits for another. Its warps take runs of pairs, in order: each counts its own, and places them after those of
// the earlier warps.
#pragma once

#include "kernels/routing/ids.h"

namespace crossdock {

// Experts of a block: on GPUs one.
struct PlacingSlice {
    uint32_t first_expert, num_experts;
};

CROSSDOCK_HOST_DEVICE PlacingSlice placing_slice(const crossdockRowPlaces_t& p, uint32_t block, uint32_t blocks) {
    const uint32_t first = static_cast<uint32_t>(uint64_t{p.num_experts} * block / blocks);
    return {first, static_cast<uint32_t>(uint64_t{p.num_experts} * (block + 1) / blocks) - first};
}

// Shared memory: two counters per expert and warp.
CROSSDOCK_HOST_DEVICE uint64_t shared_words(const PlacingSlice& slice, uint32_t warps) {
    return uint64_t{2} * slice.num_experts * warps;
}

namespace {

constexpr uint32_t kPairsOfLane = 4;  // loaded at once
constexpr uint32_t kPairsAtOnce = kPairsOfLane * static_cast<uint32_t>(kLanes);

// A warp's counters, one per expert.
struct PlacingCounters {
    int* found;
    uint32_t* next;  // the place of its next pair; pairs beyond the capacity are dropped
};

CROSSDOCK_DEVICE PlacingCounters counters_of(int* shared, const PlacingSlice& slice, uint32_t warp) {
    int* counters = shared + uint64_t{2} * slice.num_experts * warp;
    return {counters, reinterpret_cast<uint32_t*>(counters + slice.num_experts)};
}

CROSSDOCK_DEVICE uint64_t zone_rows(const crossdockRowPlaces_t& p, uint32_t expert) {
    const uint64_t count = static_cast<uint32_t>(p.counts[expert]);
    return (count + p.alignment - 1) / p.alignment * p.alignment;
}

// The beginning of an expert's zone. Must be called by the full warp.
CROSSDOCK_DEVICE uint64_t zone_begin(const Ctx& ctx, const crossdockRowPlaces_t& p, uint32_t expert) {
    uint64_t rows = 0;
    CROSSDOCK_ROLLED
    for (uint32_t i = static_cast<uint32_t>(ctx.lane()); i < expert; i += kLanes) rows += zone_rows(p, i);
    return ctx.warp_halving_sum(rows);
}

CROSSDOCK_DEVICE void store_place(const crossdockRowPlaces_t& p, uint32_t pair, int32_t place) {
    p.places[pair] = place;
    if (p.more_places == nullptr) return;
    const uint32_t row = pair / p.num_topk;
    p.more_places[static_cast<int64_t>(row) * p.more_stride + (pair - row * p.num_topk)] = place;
}

// Calls visit(pair, expert, turn) for the pairs of this warp's run, all lanes at once. expert: as in ids, kNoExpert if
// invalid, kNoPair after the last pair. turn: counts the steps of all runs.
constexpr int32_t kNoExpert = -1;
constexpr int32_t kNoPair = -2;
template <typename Visit>
CROSSDOCK_DEVICE void visit_pairs(const Ctx& ctx, const crossdockRowPlaces_t& p, Visit visit) {
    const uint32_t num_pairs = static_cast<uint32_t>(p.num_rows * p.num_topk);
    const uint64_t steps = (num_pairs + kPairsAtOnce - 1) / kPairsAtOnce;
    const uint64_t warps = static_cast<uint64_t>(ctx.num_warps());
    const uint64_t warp = static_cast<uint64_t>(ctx.warp_idx());
    const uint32_t end = static_cast<uint32_t>(steps * (warp + 1) / warps);
    CROSSDOCK_ROLLED
    for (uint32_t step = static_cast<uint32_t>(steps * warp / warps); step < end; ++step) {
        const uint32_t first = step * kPairsAtOnce + static_cast<uint32_t>(ctx.lane());
        int32_t experts[kPairsOfLane];
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kPairsOfLane; ++i) {
            const uint32_t pair = first + i * kLanes;
            experts[i] = kNoPair;
            if (pair >= num_pairs) continue;
            const int64_t id = load_id(p.ids, p.id_type, pair);
            experts[i] = id >= 0 && id < p.num_experts ? static_cast<int32_t>(id) : kNoExpert;
        }
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kPairsOfLane; ++i) visit(first + i * kLanes, experts[i], step);
    }
}

// Among the experts of the slice.
CROSSDOCK_DEVICE uint32_t own_expert(const PlacingSlice& slice, int32_t expert) {
    return static_cast<uint32_t>(expert) - slice.first_expert;  // at least num_experts if none or another block's
}

CROSSDOCK_DEVICE void count_pairs(const Ctx& ctx, const crossdockRowPlaces_t& p, const PlacingSlice& slice,
                                  const PlacingCounters& counters) {
    CROSSDOCK_ROLLED
    for (uint32_t i = static_cast<uint32_t>(ctx.lane()); i < slice.num_experts; i += kLanes) counters.found[i] = 0;
    ctx.warp_sync();
    visit_pairs(ctx, p, [&](uint32_t, int32_t expert, uint32_t) {
        const uint32_t own = own_expert(slice, expert);
        if (own < slice.num_experts) ctx.add_shared(&counters.found[own], 1);
    });
}

// Fills the places [first, end) that exist with `reason`, a negative number: why they have no source. All threads.
constexpr int32_t kGap = -1;
constexpr int32_t kBehindZones = -2;
CROSSDOCK_DEVICE void leave_empty(const crossdockRowPlaces_t& p, int32_t reason, uint64_t first, uint64_t end,
                                  uint64_t thread, uint64_t threads) {
    if (end > p.num_expanded) end = p.num_expanded;
    CROSSDOCK_ROLLED
    for (uint64_t place = first + thread; place < end; place += threads) p.sources[place] = reason;
}

// Computes where this warp's pairs begin in the slice's zones, and fills the empty places after the rows there.
CROSSDOCK_DEVICE void begin_zones(const Ctx& ctx, const crossdockRowPlaces_t& p, const PlacingSlice& slice, int* shared,
                                  const PlacingCounters& counters) {
    const uint32_t warp = static_cast<uint32_t>(ctx.warp_idx());
    uint64_t begin = zone_begin(ctx, p, slice.first_expert);
    CROSSDOCK_ROLLED
    for (uint32_t i = 0; i < slice.num_experts; ++i) {
        int before = 0;
        CROSSDOCK_ROLLED
        for (uint32_t w = static_cast<uint32_t>(ctx.lane()); w < warp; w += kLanes)
            before += counters_of(shared, slice, w).found[i];
        before = ctx.warp_sum(before);
        const uint64_t first = begin < p.num_expanded ? begin : p.num_expanded;
        if (is_leader(ctx)) counters.next[i] = static_cast<uint32_t>(first) + static_cast<uint32_t>(before);
        const uint64_t end = begin + zone_rows(p, slice.first_expert + i);
        leave_empty(p, kGap, begin + static_cast<uint32_t>(p.counts[slice.first_expert + i]), end,
                    static_cast<uint64_t>(thread_idx(ctx)), static_cast<uint64_t>(num_threads(ctx)));
        begin = end;
    }
    ctx.warp_sync();
}

// All pairs of the slice in a warp's lanes are of one expert: GPUs have one expert per block, CPUs one lane.
CROSSDOCK_DEVICE void place_pairs(const Ctx& ctx, const crossdockRowPlaces_t& p, const PlacingSlice& slice,
                                  const PlacingCounters& counters) {
    const uint32_t block = static_cast<uint32_t>(ctx.block_idx());
    const uint32_t blocks = static_cast<uint32_t>(ctx.num_blocks());
    const uint32_t lane = static_cast<uint32_t>(ctx.lane());
    visit_pairs(ctx, p, [&](uint32_t pair, int32_t expert, uint32_t turn) {
        if (expert == kNoExpert && turn % blocks == block) store_place(p, pair, -1);
        const uint32_t own = own_expert(slice, expert);
        const bool is_own = own < slice.num_experts;
        const uint32_t lanes = ctx.warp_ballot(is_own);
        if (lanes == 0) return;
        uint32_t place = 0;
        if (is_own) {
            place = counters.next[own] + static_cast<uint32_t>(number_of_ones(lanes & ((1U << lane) - 1)));
            const bool exists = place < p.num_expanded;
            if (exists) p.sources[place] = static_cast<int32_t>(pair);
            store_place(p, pair, exists ? static_cast<int32_t>(place) : -1);
        }
        ctx.warp_sync();
        if (is_own && lanes >> lane == 1) counters.next[own] = place + 1;  // the last such lane
        ctx.warp_sync();
    });
}

CROSSDOCK_DEVICE void place_rows(const Ctx& ctx, const crossdockRowPlaces_t& p) {
    const uint64_t block = static_cast<uint64_t>(ctx.block_idx());
    const uint64_t blocks = static_cast<uint64_t>(ctx.num_blocks());
    const PlacingSlice slice = placing_slice(p, static_cast<uint32_t>(block), static_cast<uint32_t>(blocks));
    int* shared = reinterpret_cast<int*>(ctx.shared_memory());
    const PlacingCounters counters = counters_of(shared, slice, static_cast<uint32_t>(ctx.warp_idx()));
    if (ctx.num_warps() > 1) {  // else there is no warp before
        count_pairs(ctx, p, slice, counters);
        ctx.block_sync();
    }
    begin_zones(ctx, p, slice, shared, counters);
    place_pairs(ctx, p, slice, counters);
    const uint64_t threads = static_cast<uint64_t>(num_threads(ctx));
    leave_empty(p, kBehindZones, zone_begin(ctx, p, p.num_experts), p.num_expanded,
                block * threads + static_cast<uint64_t>(thread_idx(ctx)), blocks * threads);
}

}  // namespace
}  // namespace crossdock
