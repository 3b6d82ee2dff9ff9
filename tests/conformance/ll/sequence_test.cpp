// SPDX-License-Identifier: Apache-2.0
// Operations of several handles, whole and split, in any legal order, never disturb each other.
#include <gtest/gtest.h>

#include "conformance/support/sequence.h"

namespace crossdock::testing {
namespace {

const ProblemLimits kSmall{.most_row_bytes = 512, .most_receive_bytes = 256u << 10, .most_tokens = 8};

Seeds seeds_from(uint64_t first, const BackendSpec& spec) { return seeds_or(first, seeds_in(spec.kind, 40)); }

TEST(Sequence, HandlesOfOneGroupInterleave) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        run_sequences(spec, {.ll_groups = 1, .layers_per_group = 4, .num_steps = 80, .ll_limits = kSmall},
                      seeds_from(2001, spec));
    });
}

TEST(Sequence, GroupsOnOneCommunicatorInterleave) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        run_sequences(spec, {.ll_groups = 2, .layers_per_group = 2, .num_steps = 60, .ll_limits = kSmall},
                      seeds_from(3001, spec));
    });
}

TEST(Sequence, CommunicatorsOfOneProcessInterleave) {
    // The simulation has one communicator.
    on_each_backend({Backend::kProcesses, Backend::kHosts, Backend::kThreads, Backend::kCuda, Backend::kCudaProcesses},
                    [](const BackendSpec& spec) {
                        run_sequences(spec,
                                      {.ll_groups = 2,
                                       .layers_per_group = 2,
                                       .num_steps = 40,
                                       .two_communicators = true,
                                       .ll_limits = kSmall},
                                      seeds_from(4001, spec));
                    });
}

// Two splits pending at once, completed in another order than they were sent in, with whole operations between.
TEST(Sequence, TwoSplitsArePendingAndAThirdIsRefused) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(3), std::nullopt, [](RankContext& context) {
            const Problem em = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 1);
            const Problem rm = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_RANK_MAJOR, 2);
            Group group(context, std::vector{em, rm});
            Layer a(context, group.get(), em), b(context, group.get(), rm), c(context, group.get(), em),
                d(context, group.get(), rm);
            for (Layer* layer : {&a, &b, &c, &d}) layer->prepare_dispatch();
            for (Layer* layer : {&a, &b}) RANK_OK(context, layer->send_dispatch());
            RANK_REFUSED(context, ncclInvalidUsage, "pending", c.send_dispatch());
            RANK_REFUSED(context, ncclInvalidUsage, "pending", a.dispatch());
            RANK_REFUSED(context, ncclInvalidUsage, "pending", a.combine());
            for (Layer* layer : {&c, &d}) {
                RANK_OK(context, layer->dispatch());
                layer->check_dispatch();
            }
            for (Layer* layer : {&b, &a}) {
                RANK_OK(context, layer->complete());
                layer->check_dispatch();
            }
            for (Layer* layer : {&a, &b, &c, &d}) layer->prepare_combine();
            for (Layer* layer : {&d, &c}) RANK_OK(context, layer->send_combine());
            for (Layer* layer : {&a, &b}) RANK_OK(context, layer->combine());
            for (Layer* layer : {&c, &d}) RANK_OK(context, layer->complete());
            for (Layer* layer : {&a, &b, &c, &d}) layer->check_combine();
        });
    });
}

// A handle that needs more room than the group has leaves older handles alone, also those with a split under way.
TEST(Sequence, AGrowingGroupKeepsHandlesAndSplits) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            Problem small = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 6);
            small.num_experts = 40 * context.num_ranks();
            std::vector<std::unique_ptr<Layer>> layers;
            Group group(context, small);
            for (const int num_topk : {1, 2, 8, 33, 64}) {
                for (const ncclEpLayout_t layout : {NCCL_EP_LAYOUT_RANK_MAJOR, NCCL_EP_LAYOUT_EXPERT_MAJOR}) {
                    if (!layers.empty()) {
                        layers.back()->prepare_dispatch();
                        RANK_OK(context, layers.back()->send_dispatch());
                    }
                    Problem larger = small;
                    larger.num_topk = num_topk;
                    larger.layout = layout;
                    auto next = std::make_unique<Layer>(context, group.get(),
                                                        rerouted(larger, static_cast<uint64_t>(num_topk)));
                    if (!layers.empty()) {
                        RANK_OK(context, layers.back()->complete());
                        layers.back()->check_dispatch();
                    }
                    layers.push_back(std::move(next));
                    for (const auto& layer : layers) layer->round_trip();
                }
            }
        });
    });
}

// A handle that goes with its split pending takes nothing of the others along, and the group goes on.
TEST(Sequence, AHandleIsDestroyedWithASplitPending) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 3);
            Group group(context, problem);
            Layer stays(context, group.get(), problem);
            for (int round = 0; round < 5; ++round) {
                auto goes = std::make_unique<Layer>(context, group.get(), problem);
                goes->prepare_dispatch();
                RANK_OK(context, goes->send_dispatch());
                stays.prepare_dispatch();
                RANK_OK(context, stays.send_dispatch());
                goes.reset();
                RANK_OK(context, stays.complete());
                stays.check_dispatch();
                stays.round_trip();
            }
        });
    });
}

// A group may go before its handles, and both with a split pending.
TEST(Sequence, AGroupIsDestroyedBeforeItsHandle) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_RANK_MAJOR, 4);
            auto group = std::make_unique<Group>(context, problem);
            Layer layer(context, group->get(), problem);
            layer.round_trip();
            layer.prepare_dispatch();
            RANK_OK(context, layer.send_dispatch());
            group.reset();
        });
    });
}

// Several combines of one dispatch, and dispatches again without a combine.
TEST(Sequence, CombinesAndDispatchesRepeat) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(4), std::nullopt, [](RankContext& context) {
            for (const ncclEpLayout_t layout : kLlLayouts) {
                const Problem problem = plain_problem(context.num_ranks(), layout, 5);
                Group group(context, problem);
                Layer layer(context, group.get(), problem);
                for (int i = 0; i < 4; ++i) {
                    layer.prepare_dispatch();
                    RANK_OK(context, layer.dispatch());
                    layer.check_dispatch();
                }
                for (int i = 0; i < 4; ++i) {
                    layer.prepare_combine();
                    RANK_OK(context, layer.combine());
                    layer.check_combine();
                }
            }
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
