// SPDX-License-Identifier: Apache-2.0
// High throughput, seeded random problems: routing's numbers, what arrives and what comes home, forward and backward,
// is what the reference says, to the byte, on every backend.
#include <gtest/gtest.h>

#include "conformance/ht/random_problem.h"
#include "conformance/support/options.h"
#include "conformance/support/scoped_arena.h"

namespace crossdock::testing {
namespace {

// Three trips with one handle, each with another routing; before the last one an update that nothing follows.
RankProgram three_trips(const HtProblem& problem, bool windows) {
    return [problem, windows](RankContext& context) {
        std::optional<ScopedArena> arena;
        if (windows) arena.emplace(context, kHtWindowBytes);
        {
            Group group(context, problem);
            HtLayer layer(context, group.get(), problem,
                          random_ht_options(problem.seed, arena ? arena->get() : nullptr));
            layer.round_trip();
            for (uint64_t step = 1; step < 3; ++step) {
                layer.route(rerouted(problem, problem.seed + step * 1'000'000));
                if (step == 2) layer.route(rerouted(problem, problem.seed + 7'000'000));
                layer.round_trip();
            }
            // No peer writes into the window any more when it goes.
            if (windows) context.barrier();
        }
    };
}

void run_seeds(const BackendSpec& spec, Seeds seeds, HtLimits limits, int most_ranks) {
    for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count && !::testing::Test::HasFailure(); ++seed) {
        limits.num_ranks = ranks_or(1 + static_cast<int>(reference::random_bits(seed, 7) % most_ranks));
        limits.mxfp8 = is_one_domain(limits.num_ranks);
        const HtProblem problem = random_ht_problem(seed, limits);
        SCOPED_TRACE(problem.describe());
        BackendSpec seeded = spec;
        seeded.deterministic.seed = seed;
        expect_clean(seeded, limits.num_ranks, seed, three_trips(problem, reference::random_bits(seed, 8) % 2 == 1));
    }
}

TEST(HtRandom, SmallShapesMatchTheReference) {
    on_each_backend(kEveryBackend,
                    [](const BackendSpec& spec) { run_seeds(spec, seeds_or(1, seeds_in(spec.kind, 100)), {}, 8); });
}

TEST(HtRandom, LargeRowsMatchTheReference) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        run_seeds(spec, seeds_or(10'001, seeds_in(spec.kind, 10)),
                  {.most_row_bytes = 65536, .most_receive_bytes = 1u << 20, .most_tokens = 6}, 4);
    });
}

// More tokens than one pass of any kernel over them takes.
TEST(HtRandom, ManyTokensMatchTheReference) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        run_seeds(spec, seeds_or(20'001, seeds_in(spec.kind, 4)),
                  {.local_experts = 5, .most_row_bytes = 64, .most_receive_bytes = 1u << 20, .most_tokens = 1500}, 4);
    });
}

// Long stretches of tokens send a rank nothing, in no step with anything that a ring may count.
TEST(HtRandom, StretchesWithoutRowsForARankMatchTheReference) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            for (const int stretch : {32, 71}) {
                HtProblem problem = plain_ht_problem(ranks_or(2), layout, 1);
                problem.max_tokens = 7000;
                problem.num_topk = 1;
                problem.hidden = problem.combine_hidden = 8;
                problem.budget = problem.most_rows();
                for (reference::RankInput& rank : problem.ranks) {
                    rank.num_tokens = problem.max_tokens;
                    rank.ids.clear();
                    // Two stretches of three go to one rank, the third to the others in turn.
                    for (int token = 0; token < problem.max_tokens; ++token)
                        rank.ids.push_back(token / stretch % 3 == 0 ? token % problem.num_experts : 0);
                    rank.weights.assign(rank.ids.size(), 0.5f);
                }
                expect_clean(spec, problem.num_ranks, std::nullopt, [=](RankContext& context) {
                    Group group(context, problem);
                    HtLayer(context, group.get(), problem).round_trip();
                });
            }
        }
    });
}

// Nobody has tokens, nobody has experts for them, everybody wants one expert.
TEST(HtRandom, ExtremeRoutingsMatchTheReference) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            expect_clean(spec, ranks_or(3), std::nullopt, [=](RankContext& context) {
                HtProblem problem = plain_ht_problem(context.num_ranks(), layout, 1);
                problem.budget = 0;
                problem.group_topk = problem.num_topk;
                Group group(context, problem);
                HtLayer layer(context, group.get(), problem);
                for (const int tokens : {0, problem.max_tokens}) {
                    // The last two become experts of this group where 32 bits are all that is looked at.
                    for (const int64_t id : {int64_t{-1}, int64_t{0}, int64_t{problem.num_experts} - 1,
                                             int64_t{problem.num_experts}, int64_t{1} << 32, INT64_MIN + 1}) {
                        for (reference::RankInput& rank : problem.ranks) {
                            rank.num_tokens = tokens;
                            rank.ids.assign(static_cast<size_t>(tokens * problem.num_topk), id);
                            rank.weights.assign(rank.ids.size(), 0.75f);
                        }
                        layer.route(problem);
                        layer.round_trip();
                    }
                }
            });
        }
    });
}

// Rows that go through stages in one part (on GPUs also with one more summer) and in several, of which the last may be
// shorter; with several senders and with one; with more terms than there are stages.
TEST(HtRandom, LongRowsMatchTheReference) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const size_t hidden : {size_t{1024}, size_t{4096}, size_t{8192}, size_t{10'264}, size_t{32'768}}) {
            HtProblem problem;
            problem.num_ranks = ranks_or(2);
            problem.num_experts = 20 * problem.num_ranks;
            problem.max_tokens = 3;
            problem.num_topk = 17;
            problem.hidden = problem.combine_hidden = hidden;
            problem.layout = NCCL_EP_LAYOUT_EXPERT_MAJOR;
            problem.budget = problem.most_rows();
            problem.seed = hidden;
            expect_clean(spec, problem.num_ranks, std::nullopt, three_trips(rerouted(problem, hidden + 1), false));
        }
    });
}

// The shape that high throughput is for, with fewer tokens: hidden 7168 in bf16, top-8 of 256 experts, 8 ranks.
TEST(HtRandom, ADeepSeekStepMatchesTheReference) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            HtProblem problem;
            problem.num_ranks = ranks_or(8);
            problem.num_experts = 32 * problem.num_ranks;
            problem.max_tokens = 6;
            problem.num_topk = 8;
            problem.hidden = problem.combine_hidden = 7168;
            problem.layout = layout;
            problem.budget = problem.most_rows();
            problem.seed = 78;
            expect_clean(spec, problem.num_ranks, std::nullopt, three_trips(rerouted(problem, 77), false));
        }
    });
}

}  // namespace
}  // namespace crossdock::testing
