// SPDX-License-Identifier: Apache-2.0
// Seeded random problems: what arrives and what returns equals the reference, byte by byte, on every backend.
#include <gtest/gtest.h>

#include <iterator>

#include "conformance/ll/layer.h"
#include "conformance/ll/random_problem.h"
#include "conformance/support/options.h"

namespace crossdock::testing {
namespace {

LayerOptions random_options(uint64_t seed) {
    Random random(seed ^ 0x5EED);
    LayerOptions options;
    options.create_in_one_call = random.chance(30);
    options.own_handle_memory = random.chance(30);
    options.in_place = random.chance(30);
    options.source_counters = random.chance(70);
    options.ask_places = random.chance(40);
    options.place_type = random.pick({ncclInt32, ncclInt64});
    options.version_1_structs = false;
    options.null_configs = random.chance(50);
    return options;
}

// Two trips with one handle, the second with another routing.
RankProgram two_trips(const Problem& problem) {
    return [problem](RankContext& context) {
        Group group(context, problem);
        Layer layer(context, group.get(), problem, random_options(problem.seed));
        layer.round_trip();
        layer.route(rerouted(problem, problem.seed + 1'000'000));
        layer.round_trip();
    };
}

void run_seeds(const BackendSpec& spec, Seeds seeds, ProblemLimits limits, int most_ranks) {
    for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count && !::testing::Test::HasFailure(); ++seed) {
        limits.num_ranks = ranks_or(1 + static_cast<int>(reference::random_bits(seed, 7) % most_ranks));
        limits.nvfp4 = !is_cuda(spec.kind);
        const Problem problem = random_problem(seed, limits);
        SCOPED_TRACE(problem.describe());
        BackendSpec seeded = spec;
        seeded.deterministic.seed = seed;
        expect_clean(seeded, limits.num_ranks, seed, two_trips(problem));
    }
}

TEST(Random, SmallShapesMatchTheReference) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        run_seeds(spec, seeds_or(1, seeds_in(spec.kind, 150)), {.most_row_bytes = 2048, .most_receive_bytes = 1u << 20},
                  8);
    });
}

TEST(Random, LargeRowsMatchTheReference) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        run_seeds(spec, seeds_or(10'001, seeds_in(spec.kind, 20)),
                  {.most_row_bytes = 32768, .most_receive_bytes = 4u << 20, .most_tokens = 6}, 4);
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
        for (const ncclEpLayout_t layout : {NCCL_EP_LAYOUT_EXPERT_MAJOR, NCCL_EP_LAYOUT_RANK_MAJOR}) {
            problem.layout = layout;
            expect_clean(spec, problem.num_ranks, std::nullopt, two_trips(rerouted(problem, 5)));
        }
    });
}

// The shape that low latency is for: hidden 7168 in bf16, top-8 of 256 experts, 8 ranks.
TEST(Random, ADeepSeekStepMatchesTheReference) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        Problem problem;
        problem.num_ranks = ranks_or(8);
        problem.num_experts = 32 * problem.num_ranks;
        problem.max_tokens = 4;
        problem.num_topk = 8;
        problem.hidden = problem.combine_hidden = 7168;
        problem.layout = NCCL_EP_LAYOUT_RANK_MAJOR;
        expect_clean(spec, problem.num_ranks, std::nullopt, two_trips(rerouted(problem, 77)));
        problem.layout = NCCL_EP_LAYOUT_EXPERT_MAJOR;
        problem.max_tokens = 1;
        expect_clean(spec, problem.num_ranks, std::nullopt, two_trips(rerouted(problem, 78)));
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

// Sources with few tokens send rows in another form than sources with many. Both meet in one operation, and rows go
// home in the form that they came in.
TEST(Random, SourcesWithFewAndManyTokensMeet) {
    Problem plain;
    plain.num_ranks = ranks_or(4);
    plain.num_experts = 3 * plain.num_ranks;
    plain.max_tokens = 16;
    plain.num_topk = 4;
    plain.hidden = plain.combine_hidden = 640;  // several segments of a row, the last one shorter
    plain.ranks.resize(plain.num_ranks);
    Problem fp8 = plain;
    fp8.recipe = reference::Recipe::kFp8;
    fp8.num_scales = fp8.hidden / 128;
    Problem sums = plain;
    sums.sums = CROSSDOCK_SUMS_SENDER;
    Problem nvfp4 = plain;
    nvfp4.combine_recipe = NCCL_EP_COMB_QUANT_NVFP4;
    on_each_backend(kEveryBackend, [&](const BackendSpec& spec) {
        for (Problem problem : {plain, fp8, sums, nvfp4}) {
            if (problem.combine_recipe == NCCL_EP_COMB_QUANT_NVFP4 && is_cuda(spec.kind)) continue;
            for (const ncclEpLayout_t layout : {NCCL_EP_LAYOUT_EXPERT_MAJOR, NCCL_EP_LAYOUT_RANK_MAJOR}) {
                problem.layout = layout;
                if (!problem.expert_major()) problem.sums = CROSSDOCK_SUMS_EXACT;
                const Seeds seeds = seeds_or(1, 3);
                for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
                    BackendSpec seeded = spec;
                    seeded.deterministic.seed = seed;
                    expect_clean(seeded, problem.num_ranks, seed, few_and_many_tokens(problem, seed));
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
        ProblemLimits limits{.num_ranks = num_ranks, .nvfp4 = !is_cuda(spec.kind)};
        for (uint64_t seed = 501; seed < 504; ++seed) {
            Problem problem = random_problem(seed, limits);
            problem.sums = CROSSDOCK_SUMS_SENDER;
            const RunReport one = expect_clean(spec, num_ranks, seed, two_trips(problem));
            const RunReport other = expect_clean(spec, num_ranks, seed, two_trips(problem));
            EXPECT_EQ(one.digests, other.digests) << "seed " << seed << ", " << problem.describe();
            if (seed != 501) continue;
            if (first.empty()) first = one.digests;
            EXPECT_EQ(one.digests, first) << backend_name(spec.kind) << " differs from the first backend";
        }
    });
}

}  // namespace
}  // namespace crossdock::testing
