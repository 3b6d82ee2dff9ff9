// SPDX-License-Identifier: Apache-2.0
// High throughput: callers of version 1 and of versions to come get what their header promises.
#include <gtest/gtest.h>

#include "conformance/support/layer.h"
#include "conformance/support/options.h"

// Exported with C++ linkage.
ncclResult_t ncclEpHandle_test_getNumRecvTokens(ncclEpHandle* handle, unsigned int* num_recv_tokens);

namespace crossdock::testing {
namespace {

// Receive tensors of version 1 callers need the rows that come, not those of the budget; their structs end earlier.
TEST(HtCompatibility, Version1CallersGiveTheRowsThatCome) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                const Problem problem = plain_problem(context.num_ranks(), layout, 1, kHighThroughput);
                ncclEpGroupConfig_t config = group_config_for(context, problem);
                config.size = NCCL_EP_GROUP_CONFIG_V1_SIZE;
                config.version = 1;
                // What lies behind version 1's struct is not its.
                config.zero_copy = static_cast<ncclEpZeroCopyMode_t>(0x5A5A);
                config.overflow_policy = static_cast<ncclEpOverflowPolicy_t>(0x5A5A);
                config.num_topk = 0x5A5A5A5A;
                Group group(context, context.comm(), config);
                Layer old(context, group.get(), problem, {.version_1_structs = true, .exact_rows = true});
                Layer with_defaults(context, group.get(), problem, {.null_configs = true, .exact_rows = true});
                for (uint64_t step = 0; step < 3; ++step) {
                    for (Layer* layer : {&old, &with_defaults}) {
                        layer->check_update();
                        layer->pass(NCCL_EP_FWD_PASS);
                    }
                    old.pass(NCCL_EP_BWD_PASS);
                    for (Layer* layer : {&old, &with_defaults}) layer->route(rerouted(problem, step));
                }
            });
        }
    });
}

// Eager mode is version 2's.
TEST(HtCompatibility, Version1CallersNameABudget) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_FLAT, 1, kHighThroughput);
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

TEST(HtCompatibility, ReturnsTheNumberOfReceivedRows) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            for (const Room room : {Room::kEnough, Room::kDropping, Room::kEager}) {
                expect_clean(spec, ranks_or(3), std::nullopt, [=](RankContext& context) {
                    Problem problem = plain_problem(context.num_ranks(), layout, 1, kHighThroughput);
                    choose_budget(problem, room, 3);
                    Group group(context, problem);
                    Layer layer(context, group.get(), problem);
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
                    Problem problem = plain_problem(context.num_ranks(), layout, 1, kHighThroughput);
                    problem.group_topk = group_topk;
                    Group group(context, problem);
                    Layer layer(context, group.get(), problem, {.open_topk = true});
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

// Rows of a combine as MXFP8, forward and backward; the recipe may change from call to call.
TEST(HtCompatibility, CombinesMayBeQuantised) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        if (!is_one_lsa_team(ranks_or(3))) return;
        for (const size_t hidden : {32, 96, 512, 2048, 7168}) {
            expect_clean(spec, ranks_or(3), std::nullopt, [=](RankContext& context) {
                Problem problem =
                    plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, hidden, kHighThroughput);
                problem.combine_hidden = hidden;
                problem.values = reference::Values::kWide;
                Problem quantised = problem;
                quantised.combine_recipe = NCCL_EP_COMB_QUANT_MXFP8;
                Group group(context, problem);
                Layer layer(context, group.get(), quantised);
                layer.round_trip();
                layer.route(problem);
                layer.round_trip();
                layer.route(rerouted(quantised, 3));
                layer.round_trip();
            });
        }
    });
}

}  // namespace
}  // namespace crossdock::testing
