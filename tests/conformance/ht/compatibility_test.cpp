// SPDX-License-Identifier: Apache-2.0
// High throughput: callers of version 1 and of versions to come get what their header promises; allocators get back
// what they gave.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "conformance/ht/random_problem.h"
#include "conformance/support/options.h"

// Exported with C++ linkage (contract 1.5).
ncclResult_t ncclEpHandle_test_getNumRecvTokens(ncclEpHandle* handle, unsigned int* num_recv_tokens);

namespace crossdock::testing {
namespace {

// Receive tensors of version 1 callers need the rows that come, not those of the budget; their structs end earlier.
TEST(HtCompatibility, Version1CallersGiveTheRowsThatCome) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                const HtProblem problem = plain_ht_problem(context.num_ranks(), layout, 1);
                ncclEpGroupConfig_t config = group_config_for(context, problem);
                config.size = NCCL_EP_GROUP_CONFIG_V1_SIZE;
                config.version = 1;
                // What lies behind version 1's struct is not its.
                config.zero_copy = static_cast<ncclEpZeroCopyMode_t>(0x5A5A);
                config.overflow_policy = static_cast<ncclEpOverflowPolicy_t>(0x5A5A);
                config.num_topk = 0x5A5A5A5A;
                Group group(context, context.comm(), config);
                HtLayer old(context, group.get(), problem, {.version_1_structs = true, .exact_rows = true});
                HtLayer with_defaults(context, group.get(), problem, {.null_configs = true, .exact_rows = true});
                for (uint64_t step = 0; step < 3; ++step) {
                    for (HtLayer* layer : {&old, &with_defaults}) {
                        layer->check_update();
                        layer->pass(NCCL_EP_FWD_PASS);
                    }
                    old.pass(NCCL_EP_BWD_PASS);
                    for (HtLayer* layer : {&old, &with_defaults}) layer->route(rerouted(problem, step));
                }
            });
        }
    });
}

// Eager mode is version 2's.
TEST(HtCompatibility, Version1CallersNameABudget) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            HtProblem problem = plain_ht_problem(context.num_ranks(), NCCL_EP_LAYOUT_FLAT, 1);
            problem.budget = 0;
            ncclEpGroupConfig_t config = group_config_for(context, problem);
            config.size = NCCL_EP_GROUP_CONFIG_V1_SIZE;
            config.version = 1;
            ncclEpGroup_t group = nullptr;
            RANK_REFUSED(context, ncclInvalidArgument, "max_recv_tokens_per_rank",
                         ncclEpCreateGroup(&group, context.comm(), &config));
        });
    });
}

TEST(HtCompatibility, TheNumberOfReceivedRowsIsTold) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            for (const Room room : {Room::kEnough, Room::kDropping, Room::kEager}) {
                expect_clean(spec, ranks_or(3), std::nullopt, [=](RankContext& context) {
                    HtProblem problem = plain_ht_problem(context.num_ranks(), layout, 1);
                    choose_budget(problem, room, 3);
                    Group group(context, problem);
                    HtLayer layer(context, group.get(), problem);
                    for (uint64_t step = 0; step < 3; ++step) {
                        unsigned int rows = 0;
                        RANK_OK(context, ncclEpHandle_test_getNumRecvTokens(layer.handle(), &rows));
                        const size_t expected = layer.routing().received(context.rank()).rows.size();
                        RANK_CHECK(context, rows == expected, "{} rows instead of {}", rows, expected);
                        layer.route(rerouted(problem, step));
                    }
                    RANK_REFUSED(context, ncclInvalidArgument, "num_recv_tokens",
                                 ncclEpHandle_test_getNumRecvTokens(layer.handle(), nullptr));
                });
            }
        }
    });
}

// A handle that was made without K takes that of its update.
TEST(HtCompatibility, KMayComeWithTheUpdate) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            for (const int group_topk : {0, 3, 5}) {
                expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                    HtProblem problem = plain_ht_problem(context.num_ranks(), layout, 1);
                    problem.group_topk = group_topk;
                    Group group(context, problem);
                    HtLayer layer(context, group.get(), problem, {.open_topk = true});
                    for (const int num_topk : {3, 1, 2}) {
                        problem.num_topk = num_topk;
                        layer.route(rerouted(problem, static_cast<uint64_t>(num_topk)));
                        layer.round_trip();
                    }
                });
            }
        }
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
TEST(HtCompatibility, AllocatorsAreBalanced) {
    on_each_backend({Backend::kProcesses, Backend::kThreads, Backend::kSimulation}, [](const BackendSpec& spec) {
        expect_clean(spec, 1, std::nullopt, [](RankContext& context) {
            for (int limit = 0; limit < 12; ++limit) {
                Books books{.limit = limit, .context = &context};
                const HtProblem problem = plain_ht_problem(1, NCCL_EP_LAYOUT_FLAT, 1);
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

// What a group says that it has from the allocator is what it has: all that peers do not reach, in either mode.
TEST(HtCompatibility, MemoryThatNoPeerReachesIsTheAllocators) {
    on_each_backend({Backend::kProcesses, Backend::kThreads, Backend::kSimulation}, [](const BackendSpec& spec) {
        expect_clean(spec, 2, std::nullopt, [](RankContext& context) {
            const HtProblem problem = plain_ht_problem(2, NCCL_EP_LAYOUT_EXPERT_MAJOR, 1);
            for (const ncclEpAlgorithm_t algorithm : {NCCL_EP_ALGO_HIGH_THROUGHPUT, NCCL_EP_ALGO_LOW_LATENCY}) {
                Books books{.context = &context};
                ncclEpGroupConfig_t config = group_config_for(context, problem);
                config.algorithm = algorithm;
                config.alloc = hooks_of(books);
                Group group(context, context.comm(), config);
                crossdockMemoryUse_t use = CROSSDOCK_MEMORY_USE_INIT;
                RANK_OK(context, crossdockGroupMemoryUse(group.get(), &use));
                size_t symmetric = 0, local = 0, handle_bytes = 0;
                RANK_OK(context, crossdockGroupMemory(group.get(), &symmetric, &local));
                RANK_CHECK(context, use.allocator_bytes == books.bytes() && use.handle_bytes == 0,
                           "{} bytes, of handles {}, {} allocated", use.allocator_bytes, use.handle_bytes,
                           books.bytes());
                RANK_CHECK(context, use.symmetric_bytes == symmetric && local == use.allocator_bytes + use.host_bytes,
                           "{} and {} bytes, {} and {} with {} of the host", symmetric, local, use.symmetric_bytes,
                           use.allocator_bytes, use.host_bytes);
                ncclEpHandle_t handle = nullptr;
                RANK_OK(context, ncclEpInitHandle(&handle, group.get(), problem.layout, nullptr, 3, nullptr));
                RANK_OK(context, ncclEpHandleMemSize(group.get(), problem.layout, nullptr, &handle_bytes, 3));
                RANK_OK(context, crossdockGroupMemoryUse(group.get(), &use));
                RANK_CHECK(context, use.allocator_bytes == books.bytes() && use.handle_bytes == handle_bytes,
                           "{} bytes, of handles {}, {} allocated", use.allocator_bytes, use.handle_bytes,
                           books.bytes());
                RANK_OK(context, ncclEpHandleDestroy(handle));
                RANK_OK(context, crossdockGroupMemoryUse(group.get(), &use));
                RANK_CHECK(context, use.allocator_bytes == books.bytes(), "{} bytes, {} allocated", use.allocator_bytes,
                           books.bytes());
                RANK_REFUSED(context, ncclInvalidArgument, "use", crossdockGroupMemoryUse(group.get(), nullptr));
                use.size -= 1;
                RANK_REFUSED(context, ncclInvalidArgument, "size", crossdockGroupMemoryUse(group.get(), &use));
            }
        });
    });
}

// One-byte rows travel in either layout, and scales of a byte, e8m0, per 32 elements.
TEST(HtCompatibility, RowsOfOneByteElementsTravel) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                for (const ncclDataType_t type : {ncclUint8, ncclInt8, ncclFloat8e4m3, ncclFloat8e5m2, ncclFloat4x2}) {
                    HtProblem problem = plain_ht_problem(context.num_ranks(), layout, 13);
                    problem.token_type = type;
                    problem.hidden = 512;
                    problem.combine_hidden = 128;
                    for (const bool with_scales : {false, true}) {
                        if (with_scales) {
                            problem.recipe = reference::Recipe::kForward;
                            problem.scale_type = ncclUint8;
                            problem.num_scales = problem.hidden / 32;
                        }
                        Group group(context, problem);
                        HtLayer(context, group.get(), problem).round_trip();
                    }
                }
            });
        }
    });
}

// Rows of a combine as MXFP8, forward and backward; the recipe may change from call to call.
TEST(HtCompatibility, CombinesMayBeQuantised) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        if (!is_one_domain(ranks_or(3))) return;
        for (const size_t hidden : {32, 96, 512, 2048, 7168}) {
            expect_clean(spec, ranks_or(3), std::nullopt, [=](RankContext& context) {
                HtProblem problem = plain_ht_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, hidden);
                problem.combine_hidden = hidden;
                problem.values = reference::Values::kWide;
                HtProblem quantised = problem;
                quantised.combine_recipe = NCCL_EP_COMB_QUANT_MXFP8;
                Group group(context, problem);
                HtLayer layer(context, group.get(), quantised);
                layer.round_trip();
                layer.route(problem);
                layer.round_trip();
                layer.route(rerouted(quantised, 3));
                layer.round_trip();
            });
        }
    });
}

// Operations allocate nothing, whatever they need for the first time.
TEST(HtCompatibility, OperationsCallNoAllocator) {
    on_each_backend({Backend::kProcesses, Backend::kThreads, Backend::kSimulation}, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            expect_clean(spec, 2, std::nullopt, [=](RankContext& context) {
                Books books{.context = &context};
                const HtProblem problem = plain_ht_problem(2, layout, 1);
                ncclEpGroupConfig_t config = group_config_for(context, problem);
                config.alloc = hooks_of(books);
                Group group(context, context.comm(), config);
                HtLayer layer(context, group.get(), problem);
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

}  // namespace
}  // namespace crossdock::testing
