// SPDX-License-Identifier: Apache-2.0
// What the library holds at the shape that low latency is for stays small: 128 tokens a rank, rows of 14,336 bytes,
// top-8 of 256 experts, 8 ranks.
#include <gtest/gtest.h>

#include <cstring>

#include "conformance/ll/layer.h"
#include "conformance/support/options.h"

namespace crossdock::testing {
namespace {

TEST(Memory, AGroupNeedsAtMost64MiB) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
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

// A handle for every forward pass: what one had serves the next, and the caller's allocator is not asked again.
TEST(Memory, HandlesThatComeAndGoAllocateNothing) {
    struct Books {
        RankContext& context;
        int num_calls = 0;
        int num_live = 0;
    };
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const auto num_ranks = static_cast<size_t>(context.num_ranks());
            const int num_handles = context.is_simulated() ? 300 : 10'000;
            constexpr size_t kHidden = 8;
            Books books{context};
            ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
            config.num_experts = static_cast<unsigned>(num_ranks);
            config.max_dispatch_tokens_per_rank = 1;
            config.max_token_bytes = kHidden * sizeof(float);
            config.timeout_ns = context.is_simulated() ? 1'000'000'000 : 60'000'000'000;
            config.alloc = {[](void** memory, size_t bytes, void* own) {
                                auto& books_of_call = *static_cast<Books*>(own);
                                ++books_of_call.num_calls;
                                ++books_of_call.num_live;
                                *memory = books_of_call.context.allocate(bytes);
                                return cudaSuccess;
                            },
                            [](void* memory, void* own) {
                                auto& books_of_call = *static_cast<Books*>(own);
                                ++books_of_call.num_calls;
                                --books_of_call.num_live;
                                books_of_call.context.deallocate(memory);
                                return cudaSuccess;
                            },
                            &books};
            {
                Group group(context, context.comm(), config);
                const cudaStream_t stream = context.make_stream();
                const float weight = 0.5f;
                std::vector<float> token(kHidden, 1.0f + static_cast<float>(context.rank()));
                Buffer ids(context, stream, sizeof(int32_t)), weights(context, stream, sizeof(float));
                Buffer tokens(context, stream, kHidden * sizeof(float)), sum(context, stream, kHidden * sizeof(float));
                Buffer rows(context, stream, num_ranks * kHidden * sizeof(float));
                Buffer counters(context, stream, sizeof(int32_t));
                weights.write(&weight, sizeof weight);
                tokens.write(token.data(), tokens.bytes());
                int calls_before = 0;
                for (int step = 0; step < num_handles; ++step) {
                    if (step == 10) calls_before = books.num_calls;
                    const int32_t expert = (context.rank() + step) % context.num_ranks();
                    ids.write(&expert, sizeof expert);
                    ncclEpHandle_t handle = nullptr;
                    Tensor topk_idx(ncclInt32, {1, 1}, ids), received(ncclFloat32, {1, num_ranks, kHidden}, rows);
                    Tensor sent(ncclFloat32, {1, kHidden}, tokens), combined(ncclFloat32, {1, kHidden}, sum);
                    Tensor counts(ncclInt32, {1}, counters), topk_weights(ncclFloat32, {1, 1}, weights);
                    ncclEpDispatchInputs_t inputs = NCCL_EP_DISPATCH_INPUTS_INIT;
                    ncclEpDispatchOutputs_t outputs = NCCL_EP_DISPATCH_OUTPUTS_INIT;
                    ncclEpLayoutInfo_t layout = NCCL_EP_LAYOUT_INFO_INIT;
                    ncclEpCombineInputs_t answers = NCCL_EP_COMBINE_INPUTS_INIT;
                    ncclEpCombineOutputs_t results = NCCL_EP_COMBINE_OUTPUTS_INIT;
                    inputs.tokens = sent;
                    outputs.tokens = answers.tokens = received;
                    layout.expert_counters = counts;
                    results.tokens = combined;
                    results.topk_weights = topk_weights;
                    RANK_OK(context,
                            ncclEpInitHandle(&handle, group.get(), NCCL_EP_LAYOUT_EXPERT_MAJOR, nullptr, 1, nullptr));
                    RANK_OK(context, ncclEpUpdateHandle(handle, topk_idx, nullptr, stream));
                    RANK_OK(context, ncclEpDispatch(handle, &inputs, &outputs, &layout, nullptr, stream));
                    RANK_OK(context, ncclEpCombine(handle, &answers, &results, nullptr, stream));
                    RANK_OK(context, ncclEpHandleDestroy(handle));
                }
                RANK_CHECK(context, books.num_calls == calls_before && books.num_live > 0,
                           "{} calls of the allocator for {} handles", books.num_calls - calls_before,
                           num_handles - 10);
                context.synchronize(stream);
                std::vector<std::byte> expected(sum.bytes());
                for (float& value : token) value *= weight;
                std::memcpy(expected.data(), token.data(), expected.size());
                sum.check(expected, expected.size(), "the sum");
            }
            RANK_CHECK(context, books.num_live == 0, "{} allocations were not freed", books.num_live);
        });
    });
}

// Handles' own memory is small too, positive, and the same for everybody.
TEST(Memory, AHandlesMemoryIsTheSameOnAllRanks) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
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
