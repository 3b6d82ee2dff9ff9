// SPDX-License-Identifier: Apache-2.0
// High throughput: what the library holds stays small at 4096 tokens a rank, rows of 14,336 bytes, top-8 of 256
// experts.
#include <gtest/gtest.h>

#include "conformance/ht/layer.h"
#include "conformance/support/options.h"

namespace crossdock::testing {
namespace {

void check_memory(RankContext& context, ncclEpZeroCopyMode_t zero_copy, size_t most_bytes) {
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
    config.num_experts = 256;
    config.max_dispatch_tokens_per_rank = 4096;
    config.max_recv_tokens_per_rank = 4096 * static_cast<unsigned>(context.num_ranks());
    config.max_token_bytes = 14336;
    config.zero_copy = zero_copy;
    config.timeout_ns = 60'000'000'000;
    Group group(context, context.comm(), config);
    ncclEpHandle_t handles[2] = {};
    RANK_OK(context, ncclEpInitHandle(&handles[0], group.get(), NCCL_EP_LAYOUT_EXPERT_MAJOR, nullptr, 8, nullptr));
    RANK_OK(context, ncclEpInitHandle(&handles[1], group.get(), NCCL_EP_LAYOUT_FLAT, nullptr, 8, nullptr));
    size_t symmetric = 0, local = 0;
    RANK_OK(context, crossdockGroupMemory(group.get(), &symmetric, &local));
    RANK_CHECK(context, symmetric > 0 && symmetric + local <= most_bytes, "{} symmetric and {} local bytes", symmetric,
               local);
    for (const ncclEpHandle_t handle : handles) RANK_OK(context, ncclEpHandleDestroy(handle));
}

TEST(HtMemory, AGroupNeeds240MiBStagedAnd40WithWindows) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        if (ranks_or(4) != 4) return;
        expect_clean(spec, 4, std::nullopt, [](RankContext& context) {
            check_memory(context, NCCL_EP_ZERO_COPY_AUTO, 240u << 20);
            check_memory(context, NCCL_EP_ZERO_COPY_ON, 40u << 20);
        });
    });
}

// Handles' own memory is positive, and the same for everybody.
TEST(HtMemory, AHandlesMemoryIsTheSameOnAllRanks) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(4), std::nullopt, [](RankContext& context) {
            HtProblem problem;
            problem.num_ranks = context.num_ranks();
            problem.num_experts = 32 * problem.num_ranks;
            problem.max_tokens = 128;
            problem.budget = 1024;
            Group group(context, problem);
            for (const ncclEpLayout_t layout : {NCCL_EP_LAYOUT_EXPERT_MAJOR, NCCL_EP_LAYOUT_FLAT}) {
                for (const int num_topk : {1, 8, 32}) {
                    size_t bytes = 0, again = 0;
                    RANK_OK(context, ncclEpHandleMemSize(group.get(), layout, nullptr, &bytes, num_topk));
                    RANK_OK(context, ncclEpHandleMemSize(group.get(), layout, nullptr, &again, num_topk));
                    RANK_CHECK(context, bytes > 0 && bytes == again, "{} and {} bytes", bytes, again);
                    std::vector<size_t> all(context.num_ranks());
                    context.all_gather(&bytes, all.data(), sizeof bytes);
                    for (const size_t other : all)
                        RANK_CHECK(context, other == bytes, "{} bytes here, {} elsewhere", bytes, other);
                }
            }
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
