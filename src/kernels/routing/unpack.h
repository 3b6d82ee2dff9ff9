// SPDX-License-Identifier: Apache-2.0
// Unpacks received routing into tensors, and counts rows per expert. One warp per row, one lane per word; the last
// block to finish writes where each expert's rows end.
#pragma once

#include "kernels/routing/ids.h"

namespace crossdock {

// Shared memory: a counter per expert, and one more word.
CROSSDOCK_HOST_DEVICE uint32_t shared_words(const crossdockRoutingReceived_t& l) {
    return l.counts == nullptr ? 0 : l.rank_experts + 1;
}

namespace {

CROSSDOCK_DEVICE uint64_t rows_received(const crossdockRoutingReceived_t& l) {
    const uint64_t num = l.received == nullptr ? l.num_received : static_cast<uint64_t>(*l.received);
    return num < l.num_rows ? num : l.num_rows;
}

CROSSDOCK_DEVICE void unpack_choice(const Ctx& ctx, const crossdockRoutingReceived_t& l, uint64_t row, uint32_t k,
                                    bool came) {
    const uint32_t* words = l.words + row * l.num_words + 1;
    const uint64_t place = row * l.num_topk + k;
    // As unsigned numbers, -1 and the experts of other ranks are all at least rank_experts.
    const uint32_t own = came ? words[k] - l.first_expert : UINT32_MAX;
    const bool is_here = own < l.rank_experts;
    const int32_t id = is_here ? static_cast<int32_t>(own) : -1;
    if (l.ids != nullptr) store_id(l.ids, l.id_type, place, id);
    if (l.more_ids != nullptr) store_id(l.more_ids, l.id_type, place, id);
    if (l.weights != nullptr) {
        const bool is_kept = is_here || l.zero_foreign_weights == 0;
        l.weights[place] = is_kept ? float_of(words[l.num_topk + k]) : 0.0F;
    }
    if (l.sources != nullptr) l.sources[row * (l.num_topk + 2) + 2 + k] = -1;
    if (l.counts != nullptr && is_here) ctx.add_shared(reinterpret_cast<int*>(ctx.shared_memory()) + own, 1);
}

CROSSDOCK_DEVICE void unpack_row(const Ctx& ctx, const crossdockRoutingReceived_t& l, uint64_t row, bool came) {
    const uint32_t lane = static_cast<uint32_t>(ctx.lane());
    const uint32_t* words = l.words + row * l.num_words;
    if (is_leader(ctx)) {
        const int32_t number = static_cast<int32_t>(words[0]);
        if (l.numbers != nullptr) l.numbers[row] = number;
        if (l.sources != nullptr) {
            l.sources[row * (l.num_topk + 2)] = number;
            l.sources[row * (l.num_topk + 2) + 1] = 0;
        }
    }
    CROSSDOCK_ROLLED
    for (uint32_t k = lane; k < l.num_topk; k += kLanes) unpack_choice(ctx, l, row, k, came);
    if (l.scales == nullptr) return;
    words += 1 + l.num_topk * (l.has_weights != 0 ? 2 : 1);
    CROSSDOCK_ROLLED
    for (uint32_t i = lane; i < l.num_scales; i += kLanes)
        l.scales[static_cast<int64_t>(row) * l.scale_strides[0] + i * l.scale_strides[1]] = words[i];
}

// The number of received rows, whose numbers ascend, with a number below the bound.
CROSSDOCK_DEVICE int32_t rows_below(const crossdockRoutingReceived_t& l, uint64_t bound) {
    uint64_t first = 0;
    uint64_t end = rows_received(l);
    CROSSDOCK_ROLLED
    while (first < end) {
        const uint64_t middle = (first + end) / 2;
        if (l.words[middle * l.num_words] < bound) {
            first = middle + 1;
        } else {
            end = middle;
        }
    }
    return static_cast<int32_t>(first);
}

// Adds the block's counts. Returns true in the last block, which sees all counts.
CROSSDOCK_DEVICE bool add_counts(const Ctx& ctx, const crossdockRoutingReceived_t& l, int* shared) {
    const uint32_t thread = static_cast<uint32_t>(thread_idx(ctx));
    const uint32_t threads = static_cast<uint32_t>(num_threads(ctx));
    auto* counts = reinterpret_cast<uint32_t*>(l.counts);
    int* is_last = shared + l.rank_experts;
    ctx.block_sync();
    CROSSDOCK_ROLLED
    for (uint32_t i = thread; i < l.rank_experts; i += threads) {
        if (shared[i] > 0) ctx.add_acq_rel_device(counts + i, static_cast<uint32_t>(shared[i]));
    }
    ctx.block_sync();
    if (thread == 0) {
        const uint32_t before = ctx.add_acq_rel_device(counts + l.rank_experts, 1);
        *is_last = before + 1 == static_cast<uint32_t>(ctx.num_blocks()) ? 1 : 0;
    }
    ctx.block_sync();
    return *is_last != 0;
}

CROSSDOCK_DEVICE void write_ends(const Ctx& ctx, const crossdockRoutingReceived_t& l, int* shared) {
    const uint32_t thread = static_cast<uint32_t>(thread_idx(ctx));
    const uint32_t threads = static_cast<uint32_t>(num_threads(ctx));
    const auto* counts = reinterpret_cast<const uint32_t*>(l.counts);
    CROSSDOCK_ROLLED
    for (uint32_t i = thread; i < l.rank_experts; i += threads)
        shared[i] = static_cast<int>(ctx.load_relaxed_device(counts + i));
    ctx.block_sync();
    if (thread != 0) return;
    uint64_t begin = 0;
    CROSSDOCK_ROLLED
    for (uint32_t i = 0; i < l.rank_experts; ++i) {
        const uint64_t rows_end = begin + static_cast<uint32_t>(shared[i]);
        const uint64_t end = begin + (rows_end - begin + l.alignment - 1) / l.alignment * l.alignment;
        const uint64_t said = l.ends_of_rows != 0 ? rows_end : end;
        l.ends[i] = static_cast<int32_t>(said < INT32_MAX ? said : INT32_MAX);
        begin = end;
    }
}

CROSSDOCK_DEVICE void unpack_routing(const Ctx& ctx, const crossdockRoutingReceived_t& l) {
    const uint32_t thread = static_cast<uint32_t>(thread_idx(ctx));
    const uint32_t threads = static_cast<uint32_t>(num_threads(ctx));
    int* shared = reinterpret_cast<int*>(ctx.shared_memory());
    if (l.counts != nullptr) {
        CROSSDOCK_ROLLED
        for (uint32_t i = thread; i < l.rank_experts; i += threads) shared[i] = 0;
        ctx.block_sync();
    }
    const uint64_t num_received = rows_received(l);
    CROSSDOCK_ROLLED
    for (uint64_t row = first_warp(ctx); row < l.num_rows; row += num_all_warps(ctx))
        unpack_row(ctx, l, row, row < num_received);
    if (l.rank_ends != nullptr && ctx.block_idx() == 0) {
        CROSSDOCK_ROLLED
        for (uint32_t rank = thread; rank < l.num_ranks; rank += threads)
            l.rank_ends[rank] = rows_below(l, uint64_t{rank + 1} * l.rank_numbers);
    }
    if (l.counts != nullptr && add_counts(ctx, l, shared)) write_ends(ctx, l, shared);
}

}  // namespace
}  // namespace crossdock
