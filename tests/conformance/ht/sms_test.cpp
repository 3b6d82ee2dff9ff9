// SPDX-License-Identifier: Apache-2.0
// High throughput: handles take as many SMs as they are told, as far as their group can serve it, and results do not
// depend on it. The simulation's ranks have two blocks per operation, and three at most; other CPUs' have one.
// (agreement_test.cpp: ranks that differ.)
#include <gtest/gtest.h>

#include "conformance/support/bad_call.h"
#include "conformance/support/layer.h"
#include "conformance/support/scoped_arena.h"
#include "conformance/support/with_lsa_team.h"

namespace crossdock::testing {
namespace {

struct Sms {
    unsigned update = 0, dispatch = 0, combine = 0;
    friend bool operator==(const Sms&, const Sms&) = default;
};

Sms sms_of(RankContext& context, const Layer& layer) {
    Sms sms;
    RANK_OK(context, crossdockHandleSms(layer.handle(), &sms.update, &sms.dispatch, &sms.combine));
    return sms;
}

// With so many asked for.
void expect_sms(RankContext& context, const Layer& layer, unsigned asked, const Sms& expected) {
    RANK_OK(context, crossdockHandleSetSms(layer.handle(), asked));
    const Sms sms = sms_of(context, layer);
    RANK_CHECK(context, sms == expected, "{} SMs: update {}, dispatch {}, combine {}, expected {}, {}, {}", asked,
               sms.update, sms.dispatch, sms.combine, expected.update, expected.dispatch, expected.combine);
}

// One number after the other, growing and shrinking: results are those of the reference, to the bit.
TEST(HtSms, ResultsAreTheSameForEveryNumber) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            for (const bool windows : {false, true}) {
                expect_clean(spec, ranks_or(3), std::nullopt, [=](RankContext& context) {
                    ScopedArena arena(context, kHtWindowBytes);
                    {
                        Problem problem = plain_problem(context.num_ranks(), layout, 21, kHighThroughput);
                        problem.max_tokens = 50;
                        problem.budget = problem.most_rows();
                        problem = rerouted(problem, 22);
                        Group group(context, problem);
                        Layer layer(
                            context, group.get(), problem,
                            {.arena = windows ? arena.get() : nullptr, .windows = kOutputs | kCombineInput | kInputs});
                        for (const unsigned number : {0u, 1u, 3u, 2u, 1000u, 1u, 40u, 24u, 0u, 64u, 7u}) {
                            RANK_OK(context, crossdockHandleSetSms(layer.handle(), number));
                            layer.round_trip();
                        }
                        context.barrier();
                    }
                });
            }
        }
    });
}

// A combine, and a dispatch along the same routing, may take another number than the dispatch before. Handles of one
// group may differ.
TEST(HtSms, OperationsOfOneRoutingMayDiffer) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(3), std::nullopt, [](RankContext& context) {
            const Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_FLAT, 23, kHighThroughput);
            Group group(context, problem);
            Layer a(context, group.get(), problem), b(context, group.get(), rerouted(problem, 24));
            unsigned number = 1;
            for (int step = 0; step < 6; ++step) {
                for (Layer* layer : {&a, &b}) {
                    RANK_OK(context, crossdockHandleSetSms(layer->handle(), number++ % 4));
                    layer->prepare_dispatch();
                    RANK_OK(context, layer->dispatch(step % 2 == 0 ? NCCL_EP_FWD_PASS : NCCL_EP_BWD_PASS));
                    layer->check_dispatch(step % 2 == 0 ? NCCL_EP_FWD_PASS : NCCL_EP_BWD_PASS);
                    RANK_OK(context, crossdockHandleSetSms(layer->handle(), 2 * number));
                    layer->prepare_combine();
                    RANK_OK(context, layer->combine());
                    layer->check_combine();
                }
            }
        });
    });
}

TEST(HtSms, HandlesTellHowManyTheyTake) {
    on_each_backend_as_one_team(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [&](RankContext& context) {
            for (const ncclEpLayout_t layout : kHtLayouts) {
                const Problem problem = plain_problem(context.num_ranks(), layout, 25, kHighThroughput);
                Group group(context, problem);
                Layer layer(context, group.get(), problem);
                const Sms usual = sms_of(context, layer);
                if (context.is_gpu()) {
                    const bool is_flat = layout == NCCL_EP_LAYOUT_FLAT;
                    RANK_CHECK(context, usual.dispatch <= (is_flat ? 24 : 64) && usual.combine <= (is_flat ? 24 : 64),
                               "dispatch {}, combine {}", usual.dispatch, usual.combine);
                    RANK_OK(context, crossdockHandleSetSms(layer.handle(), UINT32_MAX));
                    const Sms most = sms_of(context, layer);
                    RANK_CHECK(context, most.dispatch >= usual.dispatch && most.combine == most.dispatch,
                               "dispatch {}, combine {}", most.dispatch, most.combine);
                    for (const unsigned asked : {1u, 3u, 7u, 20u, 40u, 1000u}) {
                        expect_sms(context, layer, asked,
                                   {std::min(asked, most.update), std::min(asked, most.dispatch),
                                    std::min(asked, most.combine)});
                    }
                } else {
                    const unsigned blocks = spec.kind == Backend::kSimulation ? 2 : 1;
                    const unsigned most = spec.kind == Backend::kSimulation ? 3 : 1;
                    RANK_CHECK(context, usual == (Sms{blocks, blocks, blocks}), "dispatch {}", usual.dispatch);
                    expect_sms(context, layer, 1, {1, 1, 1});
                    expect_sms(context, layer, 20, {blocks, most, most});
                }
                expect_sms(context, layer, 0, usual);
                layer.round_trip();
                RANK_OK(context, crossdockHandleSms(layer.handle(), nullptr, nullptr, nullptr));
            }
            RANK_REFUSED(context, ncclInvalidArgument, "handle", crossdockHandleSetSms(nullptr, 1));
            RANK_REFUSED(context, ncclInvalidArgument, "handle",
                         crossdockHandleSms(nullptr, nullptr, nullptr, nullptr));
            const Problem ll = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_RANK_MAJOR, 26);
            Group group(context, ll);
            Layer layer(context, group.get(), ll);
            RANK_OK(context, crossdockHandleSetSms(layer.handle(), 1));
            layer.round_trip();
            RANK_REFUSED(context, ncclInvalidUsage, "HT handles",
                         crossdockHandleSms(layer.handle(), nullptr, nullptr, nullptr));
        });
    });
}

// Rings of a rank that is masked, and those between teams, never become another's.
TEST(HtSms, MasksAndTeamsKeepTheRingsOfTheDefault) {
    on_each_backend({Backend::kSimulation}, [](const BackendSpec& spec) {
        for (const bool masks : {true, false}) {
            const WithLsaTeam team(masks ? 4 : 2);
            expect_clean(spec, 4, std::nullopt, [=](RankContext& context) {
                const Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_FLAT, 27, kHighThroughput);
                ncclEpGroupConfig_t config = group_config_for(context, problem);
                crossdockGroupOptions_t options = CROSSDOCK_GROUP_OPTIONS_INIT;
                options.ht_masks = masks ? 1 : 0;
                options.lsa_team_size = masks ? 4 : 2;
                ncclEpGroup_t group = nullptr;
                RANK_OK(context, crossdockCreateGroup(&group, context.comm(), &config, &options));
                {
                    Layer layer(context, group, problem);
                    expect_sms(context, layer, 20, {2, 2, 2});
                    layer.round_trip();
                    expect_sms(context, layer, 1, {1, 1, 1});
                    layer.round_trip();
                }
                RANK_OK(context, ncclEpGroupDestroy(group));
            });
        }
    });
}

// What the group's settings allow is the most, for each operation on its own.
TEST(HtSms, TheGroupsSettingsAreTheMost) {
    on_each_backend({Backend::kCuda, Backend::kCudaProcesses}, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const Problem problem =
                plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 28, kHighThroughput);
            ncclEpGroupConfig_t config = group_config_for(context, problem);
            config.max_num_sms = 5;
            config.combine_num_sms = 3;
            Group group(context, context.comm(), config);
            Layer layer(context, group.get(), problem);
            expect_sms(context, layer, 20, {5, 5, 3});
            layer.round_trip();
            expect_sms(context, layer, 4, {4, 4, 3});
            layer.round_trip();
        });
    });
}

// The grids of the kernels: as many blocks as the handle says, and those that return at once.
TEST(HtSms, KernelsHaveSoManyBlocks) {
    on_each_backend({Backend::kCuda, Backend::kCudaProcesses}, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            constexpr unsigned kMostUnused = 8;
            for (const ncclEpLayout_t layout : kHtLayouts) {
                const Problem problem = plain_problem(context.num_ranks(), layout, 29, kHighThroughput);
                Group group(context, problem);
                Layer layer(context, group.get(), problem);
                layer.round_trip();
                layer.prepare_dispatch();
                layer.prepare_combine();
                for (const unsigned number : {0u, 1u, 6u, 20u, 40u, 1000u}) {
                    RANK_OK(context, crossdockHandleSetSms(layer.handle(), number));
                    const Sms sms = sms_of(context, layer);
                    const auto expect_blocks = [&](const char* operation, unsigned expected, unsigned most_unused,
                                                   const std::function<ncclResult_t()>& call) {
                        const std::vector<unsigned> blocks =
                            context.captured_blocks(layer.stream(), [&] { RANK_OK(context, call()); });
                        const bool fits =
                            blocks.size() == 1 && blocks[0] >= expected && blocks[0] <= expected + most_unused;
                        RANK_CHECK(context, fits, "{} with {} SMs: {} kernels, {} blocks, expected {}", operation,
                                   number, blocks.size(), blocks.empty() ? 0 : blocks[0], expected);
                    };
                    expect_blocks("update", sms.update, 0, [&] { return layer.update(); });
                    expect_blocks("dispatch", sms.dispatch, kMostUnused, [&] { return layer.dispatch(); });
                    expect_blocks("combine", sms.combine, kMostUnused, [&] { return layer.combine(); });
                }
                RANK_OK(context, crossdockHandleSetSms(layer.handle(), 0));
                layer.route(problem);  // the captured updates have not run
                layer.round_trip();
            }
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
