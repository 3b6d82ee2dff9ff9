// SPDX-License-Identifier: Apache-2.0
//
// Sizing help for ncclEpGroupConfig_t::rdma_buffer_size, in C++.
#ifndef NCCL_EP_COMMON_HPP_
#define NCCL_EP_COMMON_HPP_

#include <stddef.h>

#include "nccl_ep/ep_enums.h"

namespace nccl_ep {

// An upper bound, in bytes, of what a low-latency group needs for handles of one layout (expert-major or rank-major)
// with a top-k of up to 32. max_token_bytes as in the group's configuration; all arguments positive.
inline unsigned long get_low_latency_rdma_size_hint_for_layout(int max_tokens_per_rank, size_t max_token_bytes,
                                                               int num_ranks, int num_experts, ncclEpLayout_t layout) {
    const size_t num_topk = 32;
    const size_t tokens = static_cast<size_t>(max_tokens_per_rank);
    const size_t ranks = static_cast<size_t>(num_ranks);
    const size_t experts = static_cast<size_t>(num_experts);
    const bool expert_major = layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;

    // A dispatched row carries its routing in a header of whole 16-byte words, a combined one 4 bytes for each 256.
    const size_t header_bytes = 4 + num_topk * (expert_major ? 2 : 8);
    const size_t dispatch_row_bytes = max_token_bytes + (header_bytes + 15) / 16 * 16;
    const size_t combine_row_bytes = max_token_bytes + max_token_bytes / 256 * 4;

    const size_t dispatch_bytes = (1 + ranks) * tokens * dispatch_row_bytes;
    const size_t combine_bytes = ((expert_major ? experts : ranks) + num_topk) * tokens * combine_row_bytes;
    const size_t signal_bytes = (experts * 4 + 127) / 128 * 128;
    const size_t buffer_bytes = dispatch_bytes > combine_bytes ? dispatch_bytes : combine_bytes;
    return static_cast<unsigned long>(((buffer_bytes + signal_bytes) * 2 / 128 + 1) * 128);
}

// The same for every low-latency layout: the larger of the two bounds.
inline unsigned long get_low_latency_rdma_size_hint(int max_tokens_per_rank, size_t max_token_bytes, int num_ranks,
                                                    int num_experts) {
    const unsigned long expert_major = get_low_latency_rdma_size_hint_for_layout(
        max_tokens_per_rank, max_token_bytes, num_ranks, num_experts, NCCL_EP_LAYOUT_EXPERT_MAJOR);
    const unsigned long rank_major = get_low_latency_rdma_size_hint_for_layout(
        max_tokens_per_rank, max_token_bytes, num_ranks, num_experts, NCCL_EP_LAYOUT_RANK_MAJOR);
    return expert_major > rank_major ? expert_major : rank_major;
}

}  // namespace nccl_ep

#endif  // NCCL_EP_COMMON_HPP_
