// SPDX-License-Identifier: Apache-2.0
// What the kernel of routing counts receives.
#pragma once

#include <cstdint>

#include "nccl_ep.h"

// T tokens, K choices each, E experts, R ranks, L = E / R experts per rank (expert e is on rank e / L). Strides count
// elements; arrays without strides are dense and row-major.
struct crossdockRoutingCounts_t {
    unsigned int size;       // sizeof(crossdockRoutingCounts_t)
    unsigned int magic;      // NCCL_EP_MAGIC
    int device;              // -1: the host
    ncclDataType_t id_type;  // of topk_idx: ncclInt32 or ncclInt64
    const void* topk_idx;    // in [T, K]: expert ids; others, such as -1, are not counted
    int64_t token_stride;    // of topk_idx
    int64_t choice_stride;   // of topk_idx
    uint64_t num_tokens;     // T
    unsigned int num_topk;   // K
    unsigned int num_experts;
    unsigned int num_ranks;
    unsigned int node_ranks;  // ranks of a node, which divide R
    int32_t* per_rank;        // out [R]: tokens with an expert of the rank
    int32_t* per_node;        // out [R / node_ranks]: of the node; or NULL
    int32_t* per_expert;      // out [E]: choices
    uint8_t* is_in_rank;      // out [T, R]: 1 for a token with an expert of the rank, else 0
    int distinct;             // 1: per_expert counts an expert that a token names twice once
};
