// SPDX-License-Identifier: Apache-2.0
// The binary contract of nccl_ep.h in C++, and the sizing help of nccl_ep/common.hpp.
#include "contract.h"
#include "nccl_ep/common.hpp"

// 128 tokens per rank, rows of 14336 bytes, 8 ranks, 256 experts: the value that callers have tuned constants for.
static int check_size_hint() {
    using nccl_ep::get_low_latency_rdma_size_hint;
    using nccl_ep::get_low_latency_rdma_size_hint_for_layout;
    if (get_low_latency_rdma_size_hint(128, 14336, 8, 256) != 1073481856) return __LINE__;
    const unsigned long expert_major =
        get_low_latency_rdma_size_hint_for_layout(128, 14336, 8, 256, NCCL_EP_LAYOUT_EXPERT_MAJOR);
    const unsigned long rank_major =
        get_low_latency_rdma_size_hint_for_layout(128, 14336, 8, 256, NCCL_EP_LAYOUT_RANK_MAJOR);
    // (8 + 32) rows of combine, 14560 bytes each, for 128 tokens, twice, plus counters and the rounding up.
    if (rank_major != 2ul * 40 * 128 * 14560 + 2 * 1024 + 128) return __LINE__;
    return expert_major > rank_major ? 0 : __LINE__;
}

int main() { return report(check_initialisers()) || report(check_use()) || report(check_size_hint()); }
