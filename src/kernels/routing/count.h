// SPDX-License-Identifier: Apache-2.0
// Counts a routing. A block counts for some ranks, on GPUs for one, and reads all choices for that: so nothing has to
// be cleared first, and no block waits for another.
#pragma once

#include "device/context.h"
#include "device/numeric.h"
#include "kernels/routing/arguments.h"

namespace crossdock {

// Ranks of a block, their experts, and the nodes that begin with one of them.
struct RoutingSlice {
    uint32_t first_rank, num_ranks;
    uint32_t first_expert, num_experts;
    uint32_t first_node, num_nodes;
};

namespace {

CROSSDOCK_DEVICE int64_t load_id(const void* ids, ncclDataType_t type, int64_t index) {
    if (type == ncclInt64) return static_cast<const int64_t*>(ids)[index];
    return static_cast<const int32_t*>(ids)[index];
}

CROSSDOCK_HOST_DEVICE RoutingSlice routing_slice(const crossdockRoutingCounts_t& c, uint32_t block, uint32_t blocks) {
    RoutingSlice slice{};
    slice.first_rank = static_cast<uint32_t>(uint64_t{c.num_ranks} * block / blocks);
    const uint32_t end_rank = static_cast<uint32_t>(uint64_t{c.num_ranks} * (block + 1) / blocks);
    const uint32_t rank_experts = c.num_experts / c.num_ranks;
    slice.num_ranks = end_rank - slice.first_rank;
    slice.first_expert = slice.first_rank * rank_experts;
    slice.num_experts = slice.num_ranks * rank_experts;
    if (c.per_node == nullptr) return slice;
    slice.first_node = (slice.first_rank + c.node_ranks - 1) / c.node_ranks;
    slice.num_nodes = (end_rank + c.node_ranks - 1) / c.node_ranks - slice.first_node;
    return slice;
}

// In shared memory.
struct RoutingCounters {
    uint32_t* experts;
    uint32_t* ranks;
    uint32_t* nodes;
};

CROSSDOCK_HOST_DEVICE uint32_t num_counters(const RoutingSlice& slice) {
    return slice.num_experts + slice.num_ranks + slice.num_nodes;
}

// A thread's counts for its block's first rank and node: on GPUs a block has no other rank.
struct FirstCounts {
    uint32_t of_rank = 0;
    uint32_t of_node = 0;
};

// Choices of a token that are loaded at once.
constexpr uint32_t kIdsAtOnce = 8;

// Calls use(id, k) for the choices of a token.
template <typename Use>
CROSSDOCK_DEVICE void for_each_choice(const crossdockRoutingCounts_t& c, int64_t token, const Use& use) {
    CROSSDOCK_ROLLED
    for (uint32_t first = 0; first < c.num_topk; first += kIdsAtOnce) {
        int64_t ids[kIdsAtOnce];
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kIdsAtOnce; ++i) {
            const uint32_t k = first + i;
            ids[i] = k < c.num_topk ? load_id(c.topk_idx, c.id_type, token * c.token_stride + k * c.choice_stride) : -1;
        }
        CROSSDOCK_UNROLL
        for (uint32_t i = 0; i < kIdsAtOnce; ++i) use(ids[i], first + i);
    }
}

CROSSDOCK_DEVICE bool is_for_node(const crossdockRoutingCounts_t& c, int64_t token, uint32_t node) {
    const int64_t node_experts = int64_t{c.num_experts / c.num_ranks} * c.node_ranks;
    bool is_for = false;
    for_each_choice(c, token, [&](int64_t id, uint32_t) {
        is_for = is_for || (id >= node * node_experts && id < (node + 1) * node_experts);
    });
    return is_for;
}

// Whether an earlier choice of the token than k names the expert, too.
CROSSDOCK_DEVICE bool repeats(const crossdockRoutingCounts_t& c, int64_t token, uint32_t k, int64_t id) {
    bool found = false;
    CROSSDOCK_ROLLED
    for (uint32_t i = 0; i < k; ++i)
        found = found || load_id(c.topk_idx, c.id_type, token * c.token_stride + i * c.choice_stride) == id;
    return found;
}

CROSSDOCK_DEVICE void count_token(const Ctx& ctx, const crossdockRoutingCounts_t& c, const RoutingSlice& slice,
                                  const RoutingCounters& counters, int64_t token, FirstCounts& first) {
    uint8_t* ranks = c.is_in_rank + token * c.num_ranks + slice.first_rank;
    CROSSDOCK_ROLLED
    for (uint32_t rank = 1; rank < slice.num_ranks; ++rank) ranks[rank] = 0;
    const uint32_t rank_experts = c.num_experts / c.num_ranks;
    bool is_for_first = false;
    for_each_choice(c, token, [&](int64_t id, uint32_t k) {
        const uint64_t own = static_cast<uint64_t>(id) - slice.first_expert;  // at least num_experts if it is not here
        if (own >= slice.num_experts) return;
        if (c.distinct == 0 || !repeats(c, token, k, id)) ctx.add_shared(&counters.experts[own], 1);
        const uint32_t rank = static_cast<uint32_t>(own) / rank_experts;
        is_for_first = is_for_first || rank == 0;
        if (rank > 0) ranks[rank] = 1;
    });
    ranks[0] = is_for_first ? 1 : 0;
    first.of_rank += is_for_first ? 1 : 0;
    CROSSDOCK_ROLLED
    for (uint32_t rank = 1; rank < slice.num_ranks; ++rank) {
        if (ranks[rank] != 0) ctx.add_shared(&counters.ranks[rank], 1);
    }
    if (slice.num_nodes == 0) return;
    first.of_node += is_for_node(c, token, slice.first_node) ? 1 : 0;
    CROSSDOCK_ROLLED
    for (uint32_t node = 1; node < slice.num_nodes; ++node) {
        if (is_for_node(c, token, slice.first_node + node)) ctx.add_shared(&counters.nodes[node], 1);
    }
}

CROSSDOCK_DEVICE void count_routing(const Ctx& ctx, const crossdockRoutingCounts_t& c) {
    const RoutingSlice slice = routing_slice(c, ctx.block_idx(), ctx.num_blocks());
    const uint32_t thread = thread_idx(ctx);
    const uint32_t threads = num_threads(ctx);
    uint32_t* all = reinterpret_cast<uint32_t*>(ctx.shared_memory());
    const RoutingCounters counters{all, all + slice.num_experts, all + slice.num_experts + slice.num_ranks};
    CROSSDOCK_ROLLED
    for (uint32_t i = thread; i < num_counters(slice); i += threads) all[i] = 0;
    ctx.block_sync();

    FirstCounts first;
    CROSSDOCK_ROLLED
    for (uint64_t token = thread; token < c.num_tokens; token += threads) {
        count_token(ctx, c, slice, counters, static_cast<int64_t>(token), first);
    }
    if (first.of_rank > 0) ctx.add_shared(&counters.ranks[0], first.of_rank);
    if (first.of_node > 0) ctx.add_shared(&counters.nodes[0], first.of_node);
    ctx.block_sync();

    CROSSDOCK_ROLLED
    for (uint32_t i = thread; i < slice.num_experts; i += threads)
        c.per_expert[slice.first_expert + i] = counters.experts[i];
    CROSSDOCK_ROLLED
    for (uint32_t i = thread; i < slice.num_ranks; i += threads) c.per_rank[slice.first_rank + i] = counters.ranks[i];
    CROSSDOCK_ROLLED
    for (uint32_t i = thread; i < slice.num_nodes; i += threads) c.per_node[slice.first_node + i] = counters.nodes[i];
}

}  // namespace
}  // namespace crossdock
