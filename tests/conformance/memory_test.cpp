// SPDX-License-Identifier: Apache-2.0
// What the library holds at the shape that low latency is for stays small: 128 tokens a rank, rows of 14,336 bytes,
// top-8 of 256 experts, 8 ranks.
#include <gtest/gtest.h>

#include "layer.h"
#include "options.h"

namespace crossdock::testing {
namespace {

TEST(Memory, AGroupNeedsAtMost64MiB) {
    on_each_world(kEveryWorld, [](const WorldSpec& spec) {
        if (ranks_or(8) != 8) return;
        expect_clean(spec, 8, std::nullopt, [](RankContext& context) {
            ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
            config.num_experts = 256;
            config.max_dispatch_tokens_per_rank = 128;
            config.max_token_bytes = 14336;
            config.timeout_ns = 60'000'000'000;
            Group group(context, context.comm(), config);
            ncclEpHandle_t handles[2] = {};
            RANK_OK(context,
                    ncclEpInitHandle(&handles[0], group.get(), NCCL_EP_LAYOUT_EXPERT_MAJOR, nullptr, 8, nullptr));
            RANK_OK(context,
                    ncclEpInitHandle(&handles[1], group.get(), NCCL_EP_LAYOUT_RANK_MAJOR, nullptr, 8, nullptr));
            size_t symmetric = 0, local = 0;
            RANK_OK(context, crossdockGroupMemory(group.get(), &symmetric, &local));
            // Between several domains rows go through an outbox.
            const size_t most_mib = domain_for(8) % 8 == 0 ? 64 : 80;
            RANK_CHECK(context, symmetric > 0 && symmetric + local <= most_mib << 20, "{} symmetric and {} local bytes",
                       symmetric, local);
            RANK_OK(context, crossdockGroupMemory(group.get(), nullptr, &local));
            RANK_OK(context, crossdockGroupMemory(group.get(), &symmetric, nullptr));
            RANK_REFUSED(context, ncclInvalidArgument, "group", crossdockGroupMemory(nullptr, &symmetric, &local));
            for (const ncclEpHandle_t handle : handles) RANK_OK(context, ncclEpHandleDestroy(handle));
        });
    });
}

// Handles' own memory is small too, positive, and the same for everybody.
TEST(Memory, AHandlesMemoryIsTheSameOnAllRanks) {
    on_each_world(kEveryWorld, [](const WorldSpec& spec) {
        expect_clean(spec, ranks_or(4), std::nullopt, [](RankContext& context) {
            Problem problem;
            problem.num_ranks = context.num_ranks();
            problem.num_experts = 32 * problem.num_ranks;
            problem.max_tokens = 128;
            Group group(context, problem);
            for (const ncclEpLayout_t layout : {NCCL_EP_LAYOUT_EXPERT_MAJOR, NCCL_EP_LAYOUT_RANK_MAJOR}) {
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
