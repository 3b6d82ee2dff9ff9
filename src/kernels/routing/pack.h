// SPDX-License-Identifier: Apache-2.0
// Packs the routing that is sent with rows, and the ranks that tokens go to. One warp per token, one lane per word.
#pragma once

#include "kernels/routing/ids.h"

namespace crossdock {
namespace {

// -1 for an invalid id: an id that does not fit into 32 bits must not become another one.
CROSSDOCK_DEVICE int64_t sent_id(const crossdockRoutingSent_t& l, int64_t token, uint32_t k) {
    const int64_t id = load_id(l.topk_idx, l.id_type, token * l.token_stride + k * l.choice_stride);
    return id >= 0 && id <= INT32_MAX ? id : -1;
}

CROSSDOCK_DEVICE uint32_t routing_word(const crossdockRoutingSent_t& l, int64_t token, uint32_t word) {
    if (word == 0) return static_cast<uint32_t>(l.first_number + token);
    word -= 1;
    if (word < l.num_topk) return static_cast<uint32_t>(sent_id(l, token, word));
    word -= l.num_topk;
    if (l.weights != nullptr) {
        if (word < l.num_topk) return bits_of(l.weights[token * l.weight_strides[0] + word * l.weight_strides[1]]);
        word -= l.num_topk;
    }
    return word < l.num_scales ? l.scales[token * l.scale_strides[0] + word * l.scale_strides[1]] : 0;
}

CROSSDOCK_DEVICE void target_choices(const Ctx& ctx, const crossdockRoutingSent_t& l, int64_t token) {
    CROSSDOCK_ROLLED
    for (uint32_t k = static_cast<uint32_t>(ctx.lane()); k < l.num_targets; k += kLanes) {
        const int64_t id = sent_id(l, token, k);
        l.targets[token * l.num_targets + k] = id < 0 ? -1 : static_cast<int32_t>(id / l.rank_experts);
    }
}

CROSSDOCK_DEVICE void target_mask(const Ctx& ctx, const crossdockRoutingSent_t& l, int64_t token) {
    int32_t* targets = l.targets + token * l.num_targets;
    int num_targets = static_cast<int>(l.num_targets);
    int found = 0;
    CROSSDOCK_ROLLED
    for (uint32_t first = 0; first < l.num_ranks && found < num_targets; first += kLanes) {
        const uint32_t rank = first + static_cast<uint32_t>(ctx.lane());
        const int is_here = rank < l.num_ranks && l.is_in_rank[token * l.num_ranks + rank] != 0 ? 1 : 0;
        const int place = found + ctx.warp_sum_before(is_here);
        if (is_here != 0 && place < num_targets) targets[place] = static_cast<int32_t>(rank);
        found += ctx.warp_sum(is_here);
    }
    CROSSDOCK_ROLLED
    for (int i = found + ctx.lane(); i < num_targets; i += kLanes) targets[i] = -1;
}

CROSSDOCK_DEVICE void pack_routing(const Ctx& ctx, const crossdockRoutingSent_t& l) {
    const uint32_t lane = static_cast<uint32_t>(ctx.lane());
    CROSSDOCK_ROLLED
    for (uint64_t i = first_warp(ctx) * kLanes + lane; i < l.num_zeros; i += num_all_warps(ctx) * kLanes)
        l.zeros[i] = 0;
    CROSSDOCK_ROLLED
    for (uint64_t i = first_warp(ctx); i < l.num_tokens; i += num_all_warps(ctx)) {
        const int64_t token = static_cast<int64_t>(i);
        CROSSDOCK_ROLLED
        for (uint32_t word = lane; word < l.num_words; word += kLanes)
            l.words[i * l.num_words + word] = routing_word(l, token, word);
        if (l.targets == nullptr) continue;
        l.is_in_rank == nullptr ? target_choices(ctx, l, token) : target_mask(ctx, l, token);
    }
}

}  // namespace
}  // namespace crossdock
