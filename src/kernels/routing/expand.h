// SPDX-License-Identifier: Apache-2.0
// Copies rows, with their scales and weights, to their places by expert. A warp reads a row once for all its places;
// then warps search the zones for gaps, if these are to be zeros.
#pragma once

#include "device/row_copy.h"
#include "kernels/routing/ids.h"

namespace crossdock {

// Shared memory: one place per lane.
CROSSDOCK_HOST_DEVICE uint32_t shared_words(const crossdockExpandedRows_t&, uint32_t threads) { return threads; }

namespace {

template <typename Part, typename Target>
CROSSDOCK_DEVICE void put_parts(const Ctx& ctx, const std::byte* source, uint32_t bytes, uint32_t num_targets,
                                Target target_of) {
    CROSSDOCK_ROLLED
    for (uint32_t i = static_cast<uint32_t>(ctx.lane()); i < bytes / sizeof(Part); i += kLanes) {
        const Part part = source == nullptr ? Part{0} : reinterpret_cast<const Part*>(source)[i];
        CROSSDOCK_ROLLED
        for (uint32_t n = 0; n < num_targets; ++n) reinterpret_cast<Part*>(target_of(n))[i] = part;
    }
}

// Copies a row (NULL: zeros) to each of the places.
CROSSDOCK_DEVICE void put_row(const Ctx& ctx, const crossdockExpandedRows_t& r, const std::byte* source,
                              const uint32_t* places, uint32_t num_places) {
    if (r.row_bytes == 0) return;
    std::byte* targets = static_cast<std::byte*>(r.expanded_rows);
    const uint32_t bytes = static_cast<uint32_t>(r.row_bytes);
    const auto target_of = [&](uint32_t n) { return targets + uint64_t{places[n]} * bytes; };
    const uint64_t all = reinterpret_cast<uintptr_t>(r.rows) | reinterpret_cast<uintptr_t>(targets) | bytes;
    if (all % 4 != 0) return put_parts<uint8_t>(ctx, source, bytes, num_places, target_of);
    if (all % 16 != 0) return put_parts<uint32_t>(ctx, source, bytes, num_places, target_of);
    if (source != nullptr) return copy_row(ctx, source, bytes, num_places, target_of);
    CROSSDOCK_ROLLED
    for (uint32_t n = 0; n < num_places; ++n) zero_row(ctx, target_of(n), bytes);
}

// Likewise.
CROSSDOCK_DEVICE void put_scales(const Ctx& ctx, const crossdockExpandedRows_t& r, const uint32_t* scales,
                                 const uint32_t* places, uint32_t num_places) {
    CROSSDOCK_ROLLED
    for (uint32_t i = static_cast<uint32_t>(ctx.lane()); i < r.num_scales; i += kLanes) {
        const uint32_t scale = scales == nullptr ? 0 : scales[i * r.scale_strides[1]];
        CROSSDOCK_ROLLED
        for (uint32_t n = 0; n < num_places; ++n)
            r.expanded_scales[places[n] * r.expanded_scale_strides[0] + i * r.expanded_scale_strides[1]] = scale;
    }
}

// shared: the places that the lanes of this warp have found.
CROSSDOCK_DEVICE void expand_row(const Ctx& ctx, const crossdockExpandedRows_t& r, uint64_t row, uint32_t* shared) {
    const uint32_t lane = static_cast<uint32_t>(ctx.lane());
    CROSSDOCK_ROLLED
    for (uint32_t first = 0; first < r.num_topk; first += kLanes) {
        const uint64_t pair = row * r.num_topk + first + lane;
        const uint32_t place = first + lane < r.num_topk ? static_cast<uint32_t>(r.places[pair]) : UINT32_MAX;
        const bool exists = place < r.num_expanded;
        const uint32_t found = ctx.warp_ballot(exists);
        if (found == 0) continue;
        if (exists) {
            shared[number_of_ones(found & ((1U << lane) - 1))] = place;
            if (r.expanded_weights != nullptr) r.expanded_weights[place] = r.weights[pair];
        }
        ctx.warp_sync();
        const uint32_t num_places = static_cast<uint32_t>(number_of_ones(found));
        put_row(ctx, r, static_cast<const std::byte*>(r.rows) + row * r.row_bytes, shared, num_places);
        if (r.scales != nullptr)
            put_scales(ctx, r, r.scales + static_cast<int64_t>(row) * r.scale_strides[0], shared, num_places);
        ctx.warp_sync();
    }
}

// Consecutive places belong to different warps, since gaps are long.
CROSSDOCK_DEVICE void zero_gaps(const Ctx& ctx, const crossdockExpandedRows_t& r) {
    const uint64_t warps = num_all_warps(ctx);
    CROSSDOCK_ROLLED
    for (uint64_t first = first_warp(ctx); first < r.num_expanded; first += warps * kLanes) {
        const uint64_t own = first + static_cast<uint64_t>(ctx.lane()) * warps;
        const bool is_gap = own < r.num_expanded && r.sources[own] == -1;
        if (is_gap && r.expanded_weights != nullptr) r.expanded_weights[own] = 0.0F;
        CROSSDOCK_ROLLED
        for (uint32_t gaps = ctx.warp_ballot(is_gap); gaps != 0; gaps &= gaps - 1) {
            const uint64_t lane = static_cast<uint64_t>(number_of_ones((gaps & (0U - gaps)) - 1));
            const uint32_t place = static_cast<uint32_t>(first + lane * warps);
            put_row(ctx, r, nullptr, &place, 1);
            if (r.expanded_scales != nullptr) put_scales(ctx, r, nullptr, &place, 1);
        }
    }
}

CROSSDOCK_DEVICE void expand_rows(const Ctx& ctx, const crossdockExpandedRows_t& r) {
    uint32_t* shared =
        reinterpret_cast<uint32_t*>(ctx.shared_memory()) + static_cast<uint64_t>(ctx.warp_idx()) * kLanes;
    CROSSDOCK_ROLLED
    for (uint64_t row = first_warp(ctx); row < r.num_rows; row += num_all_warps(ctx)) expand_row(ctx, r, row, shared);
    if (r.zeros_in_gaps != 0) zero_gaps(ctx, r);
    wait_row_copies(ctx);
}

}  // namespace
}  // namespace crossdock
