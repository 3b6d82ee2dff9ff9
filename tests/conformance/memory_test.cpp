// SPDX-License-Identifier: Apache-2.0
// What the library holds stays small at the shapes that the modes are for: rows of 14,336 bytes, top-8 of 256 experts,
// 128 tokens per rank in low latency and 4096 in high throughput. Allocators get back what they gave, and operations
// ask for nothing.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "conformance/support/modes.h"

namespace crossdock::testing {
namespace {

ncclEpGroupConfig_t large_config(ncclEpAlgorithm_t algorithm, unsigned num_tokens) {
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    config.algorithm = algorithm;
    config.num_experts = 256;
    config.max_dispatch_tokens_per_rank = num_tokens;
    config.max_token_bytes = 14336;
    config.timeout_ns = 60'000'000'000;
    return config;
}

// Of a group with a handle of each layout.
void check_memory(RankContext& context, const ncclEpGroupConfig_t& config, size_t most_bytes) {
    Group group(context, context.comm(), config);
    ncclEpHandle_t handles[2] = {};
    for (size_t i = 0; i < 2; ++i)
        RANK_OK(context,
                ncclEpInitHandle(&handles[i], group.get(), layouts_of(config.algorithm)[i], nullptr, 8, nullptr));
    size_t symmetric = 0, local = 0;
    RANK_OK(context, crossdockGroupMemory(group.get(), &symmetric, &local));
    RANK_CHECK(context, symmetric > 0 && symmetric + local <= most_bytes, "{} symmetric and {} local bytes", symmetric,
               local);
    RANK_OK(context, crossdockGroupMemory(group.get(), nullptr, &local));
    RANK_OK(context, crossdockGroupMemory(group.get(), &symmetric, nullptr));
    RANK_REFUSED(context, ncclInvalidArgument, "group", crossdockGroupMemory(nullptr, &symmetric, &local));
    for (const ncclEpHandle_t handle : handles) RANK_OK(context, ncclEpHandleDestroy(handle));
}

TEST(Memory, AGroupNeedsAtMost64MiB) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        if (ranks_or(8) != 8) return;
        expect_clean(spec, 8, std::nullopt, [](RankContext& context) {
            // Between several teams rows go through an outbox.
            const size_t most_mib = lsa_team_for(8) % 8 == 0 ? 64 : 80;
            check_memory(context, large_config(kLowLatency, 128), most_mib << 20);
        });
    });
}

TEST(HtMemory, AGroupNeeds240MiBStagedAnd40WithWindows) {
    on_each_backend_as_one_team(kEveryBackend, [](const BackendSpec& spec) {
        if (ranks_or(4) != 4) return;
        expect_clean(spec, 4, std::nullopt, [](RankContext& context) {
            ncclEpGroupConfig_t config = large_config(kHighThroughput, 4096);
            config.max_recv_tokens_per_rank = 4 * 4096;
            check_memory(context, config, 240u << 20);
            config.zero_copy = NCCL_EP_ZERO_COPY_ON;
            check_memory(context, config, 40u << 20);
        });
    });
}

// Handles' own memory is positive, and the same for everybody.
TEST_BOTH_MODES(Memory, AHandlesMemoryIsTheSameOnAllRanks) {
    on_each_backend(kEveryBackend, [=](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(4), std::nullopt, [=](RankContext& context) {
            Problem problem{.algorithm = mode};
            problem.num_ranks = context.num_ranks();
            problem.num_experts = 32 * problem.num_ranks;
            problem.max_tokens = 128;
            if (problem.is_ht()) problem.budget = 1024;
            Group group(context, problem);
            for (const ncclEpLayout_t layout : layouts_of(mode)) {
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

// The books of an allocator that gives `limit` pieces.
struct Books {
    int limit = 1 << 30;
    int allocations = 0;
    int calls = 0;
    std::vector<void*> live;
    std::vector<size_t> sizes;  // of each
    RankContext* context = nullptr;

    size_t bytes() const { return std::accumulate(sizes.begin(), sizes.end(), size_t{0}); }
};

ncclEpAllocConfig_t hooks_of(Books& books) {
    return {[](void** memory, size_t size, void* hook_context) {
                Books& own = *static_cast<Books*>(hook_context);
                ++own.calls;
                if (own.allocations++ >= own.limit) return cudaErrorMemoryAllocation;
                *memory = own.context->allocate(size);
                own.live.push_back(*memory);
                own.sizes.push_back(size);
                return cudaSuccess;
            },
            [](void* memory, void* hook_context) {
                Books& own = *static_cast<Books*>(hook_context);
                ++own.calls;
                const auto found = std::find(own.live.begin(), own.live.end(), memory);
                if (found == own.live.end()) return cudaErrorInvalidValue;
                own.sizes.erase(own.sizes.begin() + (found - own.live.begin()));
                own.live.erase(found);
                own.context->deallocate(memory);
                return cudaSuccess;
            },
            &books};
}

// An allocator that has nothing fails the call, and gets back all it gave.
TEST_BOTH_MODES(Memory, AllocatorsAreBalanced) {
    on_each_backend(kCpuBackends, [=](const BackendSpec& spec) {
        expect_clean(spec, 1, std::nullopt, [=](RankContext& context) {
            for (int limit = 0; limit < 12; ++limit) {
                Books books{.limit = limit, .context = &context};
                const Problem problem = plain_problem(1, layouts_of(mode)[0], 1, mode);
                ncclEpGroupConfig_t config = group_config_for(context, problem);
                config.alloc = hooks_of(books);
                ncclEpGroup_t group = nullptr;
                ncclEpHandle_t handle = nullptr;
                ncclResult_t result = ncclEpCreateGroup(&group, context.comm(), &config);
                if (result == ncclSuccess) {
                    result = ncclEpInitHandle(&handle, group, problem.layout, nullptr, problem.num_topk, nullptr);
                }
                const bool starved = books.allocations > limit;
                RANK_CHECK(context, (result == ncclSuccess) != starved, "{} with {} of {} allocations",
                           result_name(result), limit, books.allocations);
                RANK_CHECK(context,
                           result == ncclSuccess || result == ncclUnhandledCudaError || result == ncclSystemError, "{}",
                           result_name(result));
                RANK_OK(context, ncclEpHandleDestroy(handle));
                RANK_OK(context, ncclEpGroupDestroy(group));
                RANK_CHECK(context, books.live.empty(), "{} allocations were not freed", books.live.size());
            }
        });
    });
}

// What a group says that it has from the allocator is what it has: all that peers do not reach.
TEST_BOTH_MODES(Memory, MemoryThatNoPeerReachesIsTheAllocators) {
    on_each_backend(kCpuBackends, [=](const BackendSpec& spec) {
        expect_clean(spec, 2, std::nullopt, [=](RankContext& context) {
            const Problem problem = plain_problem(2, NCCL_EP_LAYOUT_EXPERT_MAJOR, 1, mode);
            Books books{.context = &context};
            ncclEpGroupConfig_t config = group_config_for(context, problem);
            config.alloc = hooks_of(books);
            Group group(context, context.comm(), config);
            crossdockMemoryUse_t use = CROSSDOCK_MEMORY_USE_INIT;
            RANK_OK(context, crossdockGroupMemoryUse(group.get(), &use));
            size_t symmetric = 0, local = 0, handle_bytes = 0;
            RANK_OK(context, crossdockGroupMemory(group.get(), &symmetric, &local));
            RANK_CHECK(context, use.allocator_bytes == books.bytes() && use.handle_bytes == 0,
                       "{} bytes, of handles {}, {} allocated", use.allocator_bytes, use.handle_bytes, books.bytes());
            RANK_CHECK(context, use.symmetric_bytes == symmetric && local == use.allocator_bytes + use.host_bytes,
                       "{} and {} bytes, {} and {} with {} of the host", symmetric, local, use.symmetric_bytes,
                       use.allocator_bytes, use.host_bytes);
            ncclEpHandle_t handle = nullptr;
            RANK_OK(context, ncclEpInitHandle(&handle, group.get(), problem.layout, nullptr, 3, nullptr));
            RANK_OK(context, ncclEpHandleMemSize(group.get(), problem.layout, nullptr, &handle_bytes, 3));
            RANK_OK(context, crossdockGroupMemoryUse(group.get(), &use));
            RANK_CHECK(context, use.allocator_bytes == books.bytes() && use.handle_bytes == handle_bytes,
                       "{} bytes, of handles {}, {} allocated", use.allocator_bytes, use.handle_bytes, books.bytes());
            RANK_OK(context, ncclEpHandleDestroy(handle));
            RANK_OK(context, crossdockGroupMemoryUse(group.get(), &use));
            RANK_CHECK(context, use.allocator_bytes == books.bytes(), "{} bytes, {} allocated", use.allocator_bytes,
                       books.bytes());
            RANK_REFUSED(context, ncclInvalidArgument, "use", crossdockGroupMemoryUse(group.get(), nullptr));
            use.size -= 1;
            RANK_REFUSED(context, ncclInvalidArgument, "size", crossdockGroupMemoryUse(group.get(), &use));
        });
    });
}

// Operations allocate nothing, whatever they need for the first time.
TEST_BOTH_MODES(Memory, OperationsCallNoAllocator) {
    on_each_backend(kCpuBackends, [=](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : layouts_of(mode)) {
            expect_clean(spec, 2, std::nullopt, [=](RankContext& context) {
                Books books{.context = &context};
                const Problem problem = plain_problem(2, layout, 1, mode);
                ncclEpGroupConfig_t config = group_config_for(context, problem);
                config.alloc = hooks_of(books);
                Group group(context, context.comm(), config);
                Layer layer(context, group.get(), problem);
                const int calls = books.calls;
                for (uint64_t step = 0; step < 3; ++step) {
                    layer.round_trip();
                    layer.route(rerouted(problem, step));
                }
                RANK_CHECK(context, books.calls == calls, "{} calls of the allocator", books.calls - calls);
            });
        }
    });
}

// A handle for every forward pass: what one had serves the next, and the caller's allocator is not asked again.
TEST(Memory, HandlesThatComeAndGoAllocateNothing) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const auto num_ranks = static_cast<size_t>(context.num_ranks());
            const int num_handles = context.is_simulated() ? 300 : 10'000;
            constexpr size_t kHidden = 8;
            Books books{.context = &context};
            ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
            config.num_experts = static_cast<unsigned>(num_ranks);
            config.max_dispatch_tokens_per_rank = 1;
            config.max_token_bytes = kHidden * sizeof(float);
            config.timeout_ns = context.is_simulated() ? 1'000'000'000 : 60'000'000'000;
            config.alloc = hooks_of(books);
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
                    if (step == 10) calls_before = books.calls;
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
                RANK_CHECK(context, books.calls == calls_before && !books.live.empty(),
                           "{} calls of the allocator for {} handles", books.calls - calls_before, num_handles - 10);
                context.synchronize(stream);
                std::vector<std::byte> expected(sum.bytes());
                for (float& value : token) value *= weight;
                std::memcpy(expected.data(), token.data(), expected.size());
                sum.check(expected, expected.size(), "the sum");
            }
            RANK_CHECK(context, books.live.empty(), "{} allocations were not freed", books.live.size());
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
