// SPDX-License-Identifier: Apache-2.0
// High throughput: operations of several handles and groups, in any order and on any stream, never disturb each other,
// nor those of low latency on the same communicator.
#include <gtest/gtest.h>

#include "conformance/support/scoped_arena.h"
#include "conformance/support/sequence.h"

namespace crossdock::testing {
namespace {

const ProblemLimits kSmall{
    .algorithm = kHighThroughput, .most_row_bytes = 512, .most_receive_bytes = 64u << 10, .most_tokens = 8};

const ProblemLimits kSmallLl{.most_row_bytes = 256, .most_receive_bytes = 64u << 10, .most_tokens = 8};

Seeds seeds_from(uint64_t first, const BackendSpec& spec) { return seeds_or(first, seeds_in(spec.kind, 30)); }

TEST(HtSequence, HandlesOfOneGroupInterleave) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        run_sequences(spec, {.ht_groups = 1, .layers_per_group = 4, .num_steps = 60, .ht_limits = kSmall},
                      seeds_from(50'001, spec));
    });
}

TEST(HtSequence, HandlesWithWindowsInterleave) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        run_sequences(spec,
                      {.ht_groups = 1, .layers_per_group = 3, .num_steps = 50, .windows = true, .ht_limits = kSmall},
                      seeds_from(60'001, spec));
    });
}

TEST(HtSequence, GroupsOfBothModesShareACommunicator) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        run_sequences(spec,
                      {.ll_groups = 1,
                       .ht_groups = 2,
                       .layers_per_group = 2,
                       .num_steps = 60,
                       .ll_limits = kSmallLl,
                       .ht_limits = kSmall},
                      seeds_from(70'001, spec));
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
