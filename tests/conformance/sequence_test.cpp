// SPDX-License-Identifier: Apache-2.0
// Operations of several handles and groups of both modes, whole and split, in any legal order and on any stream, never
// disturb each other.
#include <gtest/gtest.h>

#include <cstdlib>

#include "conformance/support/fault_support.h"
#include "conformance/support/modes.h"
#include "conformance/support/scoped_arena.h"
#include "conformance/support/sequence.h"

namespace crossdock::testing {
namespace {

const ProblemLimits kSmall{.most_row_bytes = 512, .most_receive_bytes = 256u << 10, .most_tokens = 8};
const ProblemLimits kSmallHt{
    .algorithm = kHighThroughput, .most_row_bytes = 512, .most_receive_bytes = 64u << 10, .most_tokens = 8};
const ProblemLimits kSmallBesideHt{.most_row_bytes = 256, .most_receive_bytes = 64u << 10, .most_tokens = 8};

Seeds seeds_from(uint64_t first, const BackendSpec& spec, uint64_t count) {
    return seeds_or(first, seeds_in(spec.kind, count));
}

// Groups begin with this epoch, as if there had been many operations.
struct FirstEpoch {
    explicit FirstEpoch(uint64_t epoch) { setenv("CROSSDOCK_FIRST_EPOCH", std::to_string(epoch).c_str(), 1); }
    ~FirstEpoch() { unsetenv("CROSSDOCK_FIRST_EPOCH"); }
};

TEST(Sequence, HandlesOfOneGroupInterleave) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        run_sequences(spec, {.groups = {kSmall}, .layers_per_group = 4, .num_steps = 80}, seeds_from(2001, spec, 40));
    });
}

TEST(Sequence, GroupsOnOneCommunicatorInterleave) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        run_sequences(spec, {.groups = {kSmall, kSmall}, .layers_per_group = 2, .num_steps = 60},
                      seeds_from(3001, spec, 40));
    });
}

TEST(Sequence, CommunicatorsOfOneProcessInterleave) {
    // The simulation has one communicator.
    on_each_backend(
        {Backend::kProcesses, Backend::kHosts, Backend::kThreads, Backend::kCuda, Backend::kCudaProcesses},
        [](const BackendSpec& spec) {
            run_sequences(
                spec, {.groups = {kSmall, kSmall}, .layers_per_group = 2, .num_steps = 40, .two_communicators = true},
                seeds_from(4001, spec, 40));
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
            // A handle that is destroyed gives its split up.
            c.prepare_dispatch();
            {
                Layer e(context, group.get(), em), f(context, group.get(), em);
                for (Layer* layer : {&e, &f}) {
                    layer->prepare_dispatch();
                    RANK_OK(context, layer->send_dispatch());
                }
                RANK_REFUSED(context, ncclInvalidUsage, "call ncclEpComplete with one of their handles, or destroy it",
                             c.send_dispatch());
            }
            RANK_OK(context, c.send_dispatch());
            RANK_OK(context, c.complete());
            c.check_dispatch();
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

// Epochs keep all their bits wherever they are sent, compared or kept: here they pass 32 of them.
TEST_BOTH_MODES(Sequence, EpochsPassTheirLower32Bits) {
    on_each_backend(kEveryBackend, [=](const BackendSpec& spec) {
        const FirstEpoch late((uint64_t{1} << 32) - 20);
        run_sequences(spec, {.groups = {is_ht(mode) ? kSmallHt : kSmall}, .layers_per_group = 3, .num_steps = 60},
                      seeds_from(80'001, spec, 10));
    });
}

// After the last epoch of 40 bits an operation fails and takes nothing for its own.
TEST_BOTH_MODES(Sequence, NothingFollowsTheLastEpoch) {
    on_each_backend({Backend::kSimulation}, [=](const BackendSpec& spec) {
        const FirstEpoch late((uint64_t{1} << 40) - static_cast<uint64_t>(num_phases(mode)));
        for (const ncclEpLayout_t layout : layouts_of(mode)) {
            expect_clean(spec, ranks_or(3), std::nullopt, [=](RankContext& context) {
                const Problem problem = busy_problem(context.num_ranks(), layout, 7, mode);
                Group group(context, problem);
                Layer layer(context, group.get(), problem);
                layer.round_trip();
                prepare_phase(layer, 0);
                const ncclResult_t result = run_phase(layer, 0);
                RANK_CHECK(context, result == ncclRemoteError, "{}", result_name(result));
                context.barrier();
            });
        }
    });
}

// High throughput.

TEST(HtSequence, HandlesOfOneGroupInterleave) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        run_sequences(spec, {.groups = {kSmallHt}, .layers_per_group = 4, .num_steps = 60},
                      seeds_from(50'001, spec, 30));
    });
}

TEST(HtSequence, HandlesWithWindowsInterleave) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        run_sequences(spec, {.groups = {kSmallHt}, .layers_per_group = 3, .num_steps = 50, .windows = true},
                      seeds_from(60'001, spec, 30));
    });
}

TEST(HtSequence, GroupsOfBothModesShareACommunicator) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        run_sequences(spec, {.groups = {kSmallHt, kSmallHt, kSmallBesideHt}, .layers_per_group = 2, .num_steps = 60},
                      seeds_from(70'001, spec, 30));
    });
}

// Two handles on a stream each, in turn, with nothing awaited: the last results of both are right.
TEST(HtSequence, OperationsFollowEachOtherAcrossStreams) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            Problem flat = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_FLAT, 1, kHighThroughput);
            const Problem expert_major =
                plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 2, kHighThroughput);
            flat.budget = expert_major.budget;
            Group group(context, std::vector{flat, expert_major});
            Layer a(context, group.get(), flat), b(context, group.get(), expert_major);
            for (Layer* layer : {&a, &b}) {
                layer->prepare_update();
                layer->prepare_dispatch();
                layer->prepare_combine();
            }
            context.barrier();
            for (int step = 0; step < 30; ++step) {
                for (Layer* layer : {&a, &b}) RANK_OK(context, layer->update());
                for (Layer* layer : {&b, &a}) RANK_OK(context, layer->dispatch());
                for (Layer* layer : {&a, &b}) RANK_OK(context, layer->combine());
                for (Layer* layer : {&b, &a}) RANK_OK(context, layer->dispatch(NCCL_EP_BWD_PASS));
                for (Layer* layer : {&a, &b}) RANK_OK(context, layer->combine(NCCL_EP_BWD_PASS));
            }
            for (Layer* layer : {&a, &b}) {
                context.synchronize(layer->stream());
                layer->check_update();
                layer->check_dispatch();
                layer->check_combine(NCCL_EP_BWD_PASS);
            }
        });
    });
}

// A window's rows are still read by peers, or not yet written, while the next operations are issued: without any pause,
// with other data and routing each time, on ranks that are as fast as they can be.
TEST(HtSequence, WindowsAreReusedAtOnce) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            expect_clean(spec, ranks_or(4), std::nullopt, [=](RankContext& context) {
                ScopedArena arena(context, kHtWindowBytes);
                const Problem problem = plain_problem(context.num_ranks(), layout, 3, kHighThroughput);
                ncclEpGroupConfig_t config = group_config_for(context, problem);
                config.zero_copy = NCCL_EP_ZERO_COPY_ON;
                Group group(context, context.comm(), config);
                Layer layer(context, group.get(), problem,
                            {.arena = arena.get(), .windows = kOutputs | kCombineInput, .keep_outputs = true});
                for (uint64_t step = 0; step < 20; ++step) {
                    if (step % 4 == 3) layer.route(rerouted(problem, step));
                    layer.change_data(100 + step);
                    layer.pass(step % 3 == 1 ? NCCL_EP_BWD_PASS : NCCL_EP_FWD_PASS);
                }
                context.barrier();
            });
        }
    });
}

// Handles may go at any time, and a group before its handles.
TEST(HtSequence, AGroupIsDestroyedBeforeItsHandle) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_FLAT, 4, kHighThroughput);
            auto group = std::make_unique<Group>(context, problem);
            Layer layer(context, group->get(), problem);
            for (int i = 0; i < 3; ++i) {
                auto goes = std::make_unique<Layer>(context, group->get(), problem);
                goes->prepare_dispatch();
                RANK_OK(context, goes->dispatch());
                goes.reset();
                layer.round_trip();
                layer.route(rerouted(problem, static_cast<uint64_t>(i)));
            }
            layer.prepare_dispatch();
            RANK_OK(context, layer.dispatch());
            group.reset();
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
