// SPDX-License-Identifier: Apache-2.0
// Seeded random problems: what arrives and what returns equals the reference, byte by byte, on every backend; in high
// throughput the routing's numbers, too, and forward and backward.
#include <iterator>

#include "conformance/support/modes.h"
#include "conformance/support/scoped_arena.h"

// As in NVIDIA's tests: not in a public header.
ncclResult_t ncclEpGroup_test_setMaxDynamicSmem(ncclEpGroup* group, int bytes);

namespace crossdock::testing {
namespace {

// Round trips with one handle, each with another routing; before a third one an update that nothing follows.
// shared_bytes: that every second rank's kernels may use of a block's shared memory, as on a smaller GPU; 0: all.
RankProgram round_trips(const Problem& problem, bool windows = false, uint64_t num_round_trips = 2,
                        int shared_bytes = 0) {
    return [=](RankContext& context) {
        std::optional<ScopedArena> arena;
        if (windows) arena.emplace(context, kHtWindowBytes);
        {
            const LayerOptions options =
                random_options(problem.seed, problem.algorithm, arena ? arena->get() : nullptr);
            Group group(context, problem);
            if (shared_bytes > 0 && context.rank() % 2 == 1)
                RANK_OK(context, ncclEpGroup_test_setMaxDynamicSmem(group.get(), shared_bytes));
            Layer layer(context, group.get(), problem, options);
            layer.round_trip();
            for (uint64_t step = 1; step < num_round_trips; ++step) {
                layer.route(rerouted(problem, problem.seed + step * 1'000'000));
                if (step == 2) layer.route(rerouted(problem, problem.seed + 7'000'000));
                layer.round_trip();
            }
            // No peer writes into the window any more when it goes.
            if (windows) context.barrier();
        }
    };
}

void run_seeds(const BackendSpec& spec, Seeds seeds, ProblemLimits limits, int most_ranks, int shared_bytes = 0) {
    for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count && !::testing::Test::HasFailure(); ++seed) {
        limits.num_ranks = ranks_or(1 + static_cast<int>(reference::random_bits(seed, 7) % most_ranks));
        limits.invariant_groups = true;
        limits.quantised_combines = is_ht(limits.algorithm) ? is_one_lsa_team(limits.num_ranks) : !is_cuda(spec.kind);
        const Problem problem = random_problem(seed, limits);
        SCOPED_TRACE(problem.describe());
        const bool windows = is_ht(limits.algorithm) && reference::random_bits(seed, 8) % 2 == 1;
        expect_clean(spec, limits.num_ranks, seed,
                     round_trips(problem, windows, is_ht(limits.algorithm) ? 3 : 2, shared_bytes));
    }
}

TEST(Random, SmallShapesMatchTheReference) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        run_seeds(spec, seeds_or(1, seeds_in(spec.kind, 150)), {.most_row_bytes = 2048, .most_receive_bytes = 1u << 20},
                  8);
    });
}

TEST(HtRandom, SmallShapesMatchTheReference) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        run_seeds(spec, seeds_or(1, seeds_in(spec.kind, 100)), {.algorithm = kHighThroughput}, 8);
    });
}

// GPUs of two kinds in one group: every second rank's kernels have fewer warps or stages.
TEST_BOTH_MODES(Random, SmallShapesOfUnequalRanksMatchTheReference) {
    on_each_backend(kEveryBackend, [=](const BackendSpec& spec) {
        const int shared_bytes = is_cuda(spec.kind) ? 99 << 10 : is_ht(mode) ? 28672 : 12288;
        run_seeds(spec, seeds_or(1, seeds_in(spec.kind, 60)),
                  {.algorithm = mode, .most_row_bytes = 2048, .most_receive_bytes = 256u << 10}, 8, shared_bytes);
    });
}

TEST_BOTH_MODES(Random, LargeRowsMatchTheReference) {
    on_each_backend(kEveryBackend, [=](const BackendSpec& spec) {
        run_seeds(spec, seeds_or(10'001, seeds_in(spec.kind, is_ht(mode) ? 10 : 20)),
                  {.algorithm = mode,
                   .most_row_bytes = is_ht(mode) ? 65536u : 32768u,
                   .most_receive_bytes = is_ht(mode) ? 1u << 20 : 4u << 20,
                   .most_tokens = 6},
                  4);
    });
}

// The shape that the modes are for, with fewer tokens: hidden 7168 in bf16, top-8 of 256 experts, 8 ranks.
TEST_BOTH_MODES(Random, ADeepSeekStepMatchesTheReference) {
    on_each_backend(kEveryBackend, [=](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : layouts_of(mode)) {
            Problem problem{.algorithm = mode};
            problem.num_ranks = ranks_or(8);
            problem.num_experts = 32 * problem.num_ranks;
            problem.max_tokens = is_ht(mode) ? 6 : layout == NCCL_EP_LAYOUT_EXPERT_MAJOR ? 1 : 4;
            problem.num_topk = 8;
            problem.hidden = problem.combine_hidden = 7168;
            problem.layout = layout;
            if (problem.is_ht()) problem.budget = problem.most_rows();
            expect_clean(spec, problem.num_ranks, std::nullopt, round_trips(rerouted(problem, 77)));
        }
    });
}

// Rows that a caller holds as bytes travel as bytes, FP8 rows without a recipe too, and scales of a byte, e8m0, per 32
// elements.
TEST_BOTH_MODES(Random, RowsOfOneByteElementsMatchTheReference) {
    on_each_backend(kEveryBackend, [=](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : layouts_of(mode)) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                for (const ncclDataType_t type : {ncclUint8, ncclInt8, ncclFloat8e4m3, ncclFloat8e5m2, ncclFloat4x2}) {
                    Problem problem = plain_problem(context.num_ranks(), layout, 13, mode);
                    problem.token_type = type;
                    problem.hidden = 512;
                    for (const bool with_scales : {false, true}) {
                        if (with_scales) {
                            problem.recipe = NCCL_EP_DISP_QUANT_FWD;
                            problem.scale_type = ncclUint8;
                            problem.num_scales = problem.hidden / 32;
                        }
                        Group group(context, problem);
                        Layer(context, group.get(), problem).round_trip();
                    }
                }
            });
        }
    });
}

// A row of 64 KiB, beyond what any model has today.
TEST(Random, HugeRowsMatchTheReference) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        Problem problem;
        problem.num_ranks = ranks_or(2);
        problem.num_experts = 2 * problem.num_ranks;
        problem.max_tokens = 3;
        problem.num_topk = 2;
        problem.token_type = problem.combine_type = ncclFloat32;
        problem.hidden = problem.combine_hidden = 16384;
        for (const ncclEpLayout_t layout : kLlLayouts) {
            problem.layout = layout;
            expect_clean(spec, problem.num_ranks, std::nullopt, round_trips(rerouted(problem, 5)));
        }
    });
}

// Each rank has few tokens, then many, then few again, and never as many as the others.
RankProgram few_and_many_tokens(const Problem& problem, uint64_t seed) {
    return [problem, seed](RankContext& context) {
        constexpr int kFewAndMany[] = {1, 16, 4, 5, 8, 9, 0};
        Group group(context, problem);
        Layer layer(context, group.get(), rerouted(problem, seed, true));
        for (size_t step = 0; step < std::size(kFewAndMany); ++step) {
            Problem next = problem;
            for (size_t rank = 0; rank < next.ranks.size(); ++rank)
                next.ranks[rank].num_tokens = kFewAndMany[(rank + step) % std::size(kFewAndMany)];
            layer.route(rerouted(next, 100 * seed + step, true));
            layer.round_trip();
        }
    };
}

// Sources with few tokens send rows in another form than sources with many. Both meet in one operation, and rows
// return in the form that they came in.
TEST(Random, SourcesWithFewAndManyTokensMeet) {
    Problem plain;
    plain.num_ranks = ranks_or(4);
    plain.num_experts = 3 * plain.num_ranks;
    plain.max_tokens = 16;
    plain.num_topk = 4;
    plain.hidden = plain.combine_hidden = 640;  // several segments of a row, the last one shorter
    plain.ranks.resize(plain.num_ranks);
    std::vector<Problem> problems{plain, plain};
    problems.back().sums = CROSSDOCK_SUMS_SENDER;
    for (const DispatchRecipe& recipe : quantising_dispatches()) {
        problems.push_back(plain);
        problems.back().recipe = recipe.value;
        problems.back().num_scales = plain.hidden / recipe.scale_block;
    }
    for (const CombineRecipe& recipe : quantising_combines(kLowLatency, false)) {
        problems.push_back(plain);
        problems.back().combine_recipe = recipe.value;
    }
    on_each_backend(kEveryBackend, [&](const BackendSpec& spec) {
        for (Problem problem : problems) {
            if (!recipe_of(problem.combine_recipe).compute_capabilities.empty() && is_cuda(spec.kind)) continue;
            for (const ncclEpLayout_t layout : kLlLayouts) {
                problem.layout = layout;
                if (!problem.expert_major()) problem.sums = CROSSDOCK_SUMS_EXACT;
                const Seeds seeds = seeds_or(1, 3);
                for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
                    expect_clean(spec, problem.num_ranks, seed, few_and_many_tokens(problem, seed));
                }
            }
        }
    });
}

// Equal inputs give equal bits: in a second run, in a run of another backend, and with every number of ranks.
TEST(Random, RunsAndBackendsAgreeBitForBit) {
    std::vector<uint64_t> first;
    on_each_backend(kEveryBackend, [&first](const BackendSpec& spec) {
        const int num_ranks = ranks_or(4);
        ProblemLimits limits{.num_ranks = num_ranks, .quantised_combines = !is_cuda(spec.kind)};
        for (uint64_t seed = 501; seed < 504; ++seed) {
            Problem problem = random_problem(seed, limits);
            problem.sums = CROSSDOCK_SUMS_SENDER;
            const RunReport one = expect_clean(spec, num_ranks, seed, round_trips(problem));
            const RunReport other = expect_clean(spec, num_ranks, seed, round_trips(problem));
            EXPECT_EQ(one.digests, other.digests) << "seed " << seed << ", " << problem.describe();
            if (seed != 501) continue;
            if (first.empty()) first = one.digests;
            EXPECT_EQ(one.digests, first) << backend_name(spec.kind) << " differs from the first backend";
        }
    });
}

// More tokens than one pass of any kernel over them takes.
TEST(HtRandom, ManyTokensMatchTheReference) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        run_seeds(spec, seeds_or(20'001, seeds_in(spec.kind, 4)),
                  {.algorithm = kHighThroughput,
                   .local_experts = 5,
                   .most_row_bytes = 64,
                   .most_receive_bytes = 1u << 20,
                   .most_tokens = 1500},
                  4);
    });
}

// Long stretches of tokens send a rank nothing, in no step with anything that a ring may count.
TEST(HtRandom, StretchesWithoutRowsForARankMatchTheReference) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            for (const int stretch : {32, 71}) {
                Problem problem = plain_problem(ranks_or(2), layout, 1, kHighThroughput);
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
                    Layer(context, group.get(), problem).round_trip();
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
                Problem problem = plain_problem(context.num_ranks(), layout, 1, kHighThroughput);
                problem.budget = 0;
                problem.group_topk = problem.num_topk;
                Group group(context, problem);
                Layer layer(context, group.get(), problem);
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
            Problem problem{.algorithm = kHighThroughput};
            problem.num_ranks = ranks_or(2);
            problem.num_experts = 20 * problem.num_ranks;
            problem.max_tokens = 3;
            problem.num_topk = 17;
            problem.hidden = problem.combine_hidden = hidden;
            problem.layout = NCCL_EP_LAYOUT_EXPERT_MAJOR;
            problem.budget = problem.most_rows();
            problem.seed = hidden;
            expect_clean(spec, problem.num_ranks, std::nullopt, round_trips(rerouted(problem, hidden + 1)));
        }
    });
}

}  // namespace
}  // namespace crossdock::testing
