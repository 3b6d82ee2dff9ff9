// SPDX-License-Identifier: Apache-2.0
// Invariant groups: a token's sum is that of its choices' rows in their order, whatever the number of ranks, LSA teams,
// mode and SMs. Random problems of every size are in HtRandom and Random.
#include <gtest/gtest.h>

#include "conformance/support/modes.h"
#include "conformance/support/options.h"
#include "conformance/support/with_lsa_team.h"

namespace crossdock::testing {
namespace {

Problem invariant_problem(uint64_t seed, ncclEpAlgorithm_t mode, int num_ranks) {
    ProblemLimits limits{.algorithm = mode, .num_ranks = num_ranks, .most_row_bytes = 512};
    limits.quantised_combines = false;
    Problem problem = random_problem(seed, limits);
    while (!problem.expert_major()) problem = random_problem(seed += 10'000, limits);
    problem.sums = CROSSDOCK_SUMS_EXACT;
    problem.invariant = true;
    return problem;
}

// 1 x 8, 2 x 4, 4 x 2 and 8 x 1, forward and backward: the reference knows no teams.
TEST_BOTH_MODES(Invariant, EveryShapeOfLsaTeamsGivesTheSameSums) {
    on_each_backend({Backend::kProcesses, Backend::kThreads, Backend::kSimulation}, [=](const BackendSpec& spec) {
        const Seeds seeds = seeds_or(61, 4);
        for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
            const Problem problem = invariant_problem(seed, mode, 8);
            SCOPED_TRACE(problem.describe());
            for (const int lsa_team_size : {8, 4, 2, 1}) {
                const WithLsaTeam team(lsa_team_size);
                expect_clean(spec, 8, seed, [problem](RankContext& context) {
                    Group group(context, problem);
                    Layer layer(context, group.get(), problem);
                    layer.round_trip();
                    layer.route(rerouted(problem, problem.seed + 1000));
                    layer.round_trip();
                });
            }
        }
    });
}

// A combine that the group refuses with that message; then the group still works.
void expect_refusal(RankContext& context, ncclEpGroup_t group, Problem problem, const char* word) {
    problem = rerouted(problem, 8);
    Layer layer(context, group, problem);
    layer.prepare_dispatch();
    RANK_OK(context, layer.dispatch());
    layer.check_dispatch();
    layer.prepare_combine();
    RANK_REFUSED(context, ncclInvalidUsage, word, layer.combine());
}

TEST_BOTH_MODES(Invariant, OtherCombinesAreRefused) {
    on_each_backend(kEveryBackend, [=](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
            Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 3, mode);
            problem.invariant = true;
            problem.hidden = problem.combine_hidden = 64;
            Group group(context, problem);
            Problem other = problem;
            other.layout = is_ht(mode) ? NCCL_EP_LAYOUT_FLAT : NCCL_EP_LAYOUT_RANK_MAJOR;
            expect_refusal(context, group.get(), other, "an invariant group combines expert-major rows");
            if (is_ht(mode) && is_one_lsa_team(context.num_ranks())) {
                other = problem;
                other.combine_recipe = NCCL_EP_COMB_QUANT_MXFP8;
                expect_refusal(context, group.get(), other, "an invariant group combines rows as they are");
            }
            Layer layer(context, group.get(), rerouted(problem, 9));
            if (!is_ht(mode)) {
                RANK_REFUSED(context, ncclInvalidUsage, "an invariant group has exact sums",
                             crossdockHandleSetSums(layer.handle(), CROSSDOCK_SUMS_SENDER));
            }
            layer.round_trip();
        });
    });
}

TEST_BOTH_MODES(Invariant, WrongOptionsAreRefused) {
    on_each_backend(kEveryBackend, [=](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
            const Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 3, mode);
            const ncclEpGroupConfig_t config = group_config_for(context, problem);
            crossdockGroupOptions_t options = CROSSDOCK_GROUP_OPTIONS_INIT;
            ncclEpGroup_t made = nullptr;
            options.invariant = 2;
            RANK_REFUSED(context, ncclInvalidArgument, "options->invariant is 2, allowed: 0 (off), 1 (on)",
                         crossdockCreateGroup(&made, context.comm(), &config, &options));
            if (context.num_ranks() == 1) return;
            options.invariant = context.rank() == 1 ? 1 : 0;
            RANK_REFUSED(context, ncclInvalidUsage, "invariant differs between ranks: 0 on rank 0, 1 on rank 1",
                         crossdockCreateGroup(&made, context.comm(), &config, &options));
            RANK_CHECK(context, made == nullptr, "a group was written");
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
