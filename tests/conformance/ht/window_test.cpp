// SPDX-License-Identifier: Apache-2.0
// High throughput: tensors in windows, in plain memory and in any mixture give the same bits; promised windows must be
// there.
#include <gtest/gtest.h>

#include <algorithm>

#include "conformance/support/layer.h"
#include "conformance/support/options.h"
#include "conformance/support/scoped_arena.h"

namespace crossdock::testing {
namespace {

struct Path {
    unsigned windows;
    ncclEpZeroCopyMode_t zero_copy;
    Naming naming;
};

constexpr Path kPaths[] = {
    {0, NCCL_EP_ZERO_COPY_AUTO, Naming::kData},
    {kOutputs, NCCL_EP_ZERO_COPY_AUTO, Naming::kWindowOnly},
    {kCombineInput, NCCL_EP_ZERO_COPY_OFF, Naming::kWindowAndData},
    {kOutputs | kCombineInput, NCCL_EP_ZERO_COPY_OFF, Naming::kWindowOnly},
    {kOutputs | kCombineInput, NCCL_EP_ZERO_COPY_ON, Naming::kWindowOnly},
    {kInputs, NCCL_EP_ZERO_COPY_AUTO, Naming::kWindowOnly},
    {kInputs | kCombineInput, NCCL_EP_ZERO_COPY_OFF, Naming::kWindowAndData},
    {kOutputs | kCombineInput | kInputs | kOtherTensors, NCCL_EP_ZERO_COPY_ON, Naming::kWindowAndData},
    {kOutputs | kCombineInput | kInputs | kOtherTensors, NCCL_EP_ZERO_COPY_AUTO, Naming::kWindowOnly},
};

TEST(HtWindow, EveryPathGivesTheSameBits) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        const Seeds seeds = seeds_or(80'001, seeds_in(spec.kind, 12));
        for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
            const int num_ranks = ranks_or(1 + static_cast<int>(reference::random_bits(seed, 7) % 4));
            const Problem problem = random_problem(seed, {.algorithm = kHighThroughput,
                                                          .num_ranks = num_ranks,
                                                          .most_row_bytes = 1024,
                                                          .quantised_combines = is_one_lsa_team(num_ranks)});
            SCOPED_TRACE(problem.describe());
            expect_clean(spec, num_ranks, seed, [=](RankContext& context) {
                std::vector<std::byte> first;
                for (const Path& path : kPaths) {
                    ScopedArena arena(context, kHtWindowBytes);
                    {
                        ncclEpGroupConfig_t config = group_config_for(context, problem);
                        config.zero_copy = path.zero_copy;
                        Group group(context, context.comm(), config);
                        Layer layer(context, group.get(), problem,
                                    {.arena = arena.get(),
                                     .naming = path.naming,
                                     .windows = path.windows,
                                     .in_place = path.windows != kOutputs && path.windows != kCombineInput});
                        layer.round_trip();
                        const std::vector<std::byte> combined = layer.combined();
                        if (first.empty()) first = combined;
                        RANK_CHECK(context, combined == first, "path {} gives other bits", &path - kPaths);
                        context.barrier();
                    }
                }
            });
        }
    });
}

// Windows are each rank's own affair: where the sender has none, or the receiver, rows take the other path. So do rows
// between a rank with its inputs in windows and one with its outputs, and those of inputs that do not lie alike.
TEST(HtWindow, RanksMayDiffer) {
    struct Windows {
        unsigned of_even_ranks, of_odd_ranks;
    };
    constexpr Windows kDifferent[] = {
        {kOutputs, 0}, {kCombineInput, 0}, {kInputs, 0}, {kInputs, kOutputs}, {kInputs, kInputs | kOtherTensors}};
    on_each_backend(kEveryBackend, [&](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            for (const Windows& windows : kDifferent) {
                expect_clean(spec, ranks_or(3), std::nullopt, [=](RankContext& context) {
                    const Problem problem = plain_problem(context.num_ranks(), layout, 12, kHighThroughput);
                    ScopedArena arena(context, kHtWindowBytes);
                    {
                        Group group(context, problem);
                        const bool is_even = context.rank() % 2 == 0;
                        Layer layer(
                            context, group.get(), problem,
                            {.arena = arena.get(), .windows = is_even ? windows.of_even_ranks : windows.of_odd_ranks});
                        for (uint64_t step = 0; step < 4; ++step) {
                            layer.round_trip();
                            layer.route(rerouted(problem, 120 + step));
                        }
                        context.barrier();
                    }
                });
            }
        }
    });
}

// Rows in one part and in several, of which the last may be shorter, and from more ranks than there are stages.
TEST(HtWindow, LongRowsMatchTheReference) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const auto& [hidden, layout] : {std::pair{size_t{1024}, NCCL_EP_LAYOUT_FLAT},
                                             {size_t{4096}, NCCL_EP_LAYOUT_FLAT},
                                             {size_t{10'264}, NCCL_EP_LAYOUT_FLAT},
                                             {size_t{10'264}, NCCL_EP_LAYOUT_EXPERT_MAJOR}}) {
            Problem problem{.algorithm = kHighThroughput};
            problem.num_ranks = ranks_or(6);
            problem.num_experts = 4 * problem.num_ranks;
            problem.max_tokens = 9;
            problem.num_topk = std::min(12, problem.num_experts);
            problem.hidden = problem.combine_hidden = hidden;
            problem.layout = layout;
            problem.budget = problem.most_rows();
            problem.seed = hidden;
            problem = rerouted(problem, hidden + 1);
            expect_clean(spec, problem.num_ranks, std::nullopt, [=](RankContext& context) {
                ScopedArena arena(context, kHtWindowBytes);
                {
                    Group group(context, problem);
                    Layer layer(context, group.get(), problem,
                                {.arena = arena.get(), .windows = kCombineInput | kInputs});
                    layer.round_trip();
                    context.barrier();
                }
            });
        }
    });
}

TEST(HtWindow, PromisedWindowsMustBeThere) {
    on_each_backend(reaching_windows(kEveryBackend), [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                const Problem problem = plain_problem(context.num_ranks(), layout, 11, kHighThroughput);
                ScopedArena arena(context, kHtWindowBytes);
                {
                    ncclEpGroupConfig_t config = group_config_for(context, problem);
                    config.zero_copy = NCCL_EP_ZERO_COPY_ON;
                    Group group(context, context.comm(), config);
                    Layer plain(context, group.get(), problem);
                    Layer half(context, group.get(), problem, {.arena = arena.get(), .windows = kOutputs});
                    plain.prepare_dispatch();
                    RANK_REFUSED(context, ncclInvalidArgument, "window", plain.dispatch());
                    RANK_REFUSED(context, ncclInvalidArgument, "window", plain.dispatch(NCCL_EP_BWD_PASS));
                    plain.prepare_combine();
                    RANK_REFUSED(context, ncclInvalidArgument, "window", plain.combine());
                    plain.check_nothing_was_written();
                    half.prepare_dispatch();
                    RANK_OK(context, half.dispatch());
                    half.check_dispatch();
                    half.prepare_combine();
                    RANK_REFUSED(context, ncclInvalidArgument, "window", half.combine());
                    context.barrier();
                }
            });
        }
    });
}

}  // namespace
}  // namespace crossdock::testing
