// SPDX-License-Identifier: Apache-2.0
// Where combine sums is the caller's choice: per handle, or for all by the environment; the bound of crossdock.h holds
// either way.
#include <gtest/gtest.h>

#include <cstdlib>

#include "conformance/support/layer.h"
#include "conformance/support/options.h"

namespace crossdock::testing {
namespace {

// Many experts per rank and a large top-k, so that the sender has something to sum.
Problem crowded_problem(int num_ranks, ncclDataType_t type, crossdockSums_t sums) {
    Problem problem;
    problem.num_ranks = num_ranks;
    problem.num_experts = 16 * num_ranks;
    problem.max_tokens = 8;
    problem.num_topk = 12;
    problem.combine_type = type;
    problem.hidden = problem.combine_hidden = 128;
    problem.sums = sums;
    problem.ranks.resize(num_ranks);
    Random random(3);
    for (reference::RankInput& rank : problem.ranks) {
        rank.num_tokens = problem.max_tokens;
        for (int i = 0; i < problem.max_tokens * problem.num_topk; ++i) {
            rank.ids.push_back(random.below(problem.num_experts));
            rank.weights.push_back(static_cast<float>(random.unit()));
        }
    }
    return problem;
}

std::vector<std::byte> combined_with(RankContext& context, ncclEpGroup_t group, const Problem& problem) {
    Layer layer(context, group, problem);
    layer.round_trip();
    return layer.combined();
}

TEST(Sums, SenderSumsKeepTheirBoundAndDiffer) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclDataType_t type : {ncclBfloat16, ncclFloat16}) {
            expect_clean(spec, ranks_or(4), std::nullopt, [=](RankContext& context) {
                const Problem exact = crowded_problem(context.num_ranks(), type, CROSSDOCK_SUMS_EXACT);
                const Problem sender = crowded_problem(context.num_ranks(), type, CROSSDOCK_SUMS_SENDER);
                Group group(context, exact);
                const std::vector<std::byte> one = combined_with(context, group.get(), sender);
                const std::vector<std::byte> again = combined_with(context, group.get(), sender);
                const std::vector<std::byte> other = combined_with(context, group.get(), exact);
                RANK_CHECK(context, one == again, "two runs differ");
                RANK_CHECK(context, one != other, "the choice of sums changes nothing");
            });
        }
    });
}

TEST(Sums, AHandleChangesFromCombineToCombine) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(3), std::nullopt, [](RankContext& context) {
            const Problem exact = crowded_problem(context.num_ranks(), ncclBfloat16, CROSSDOCK_SUMS_EXACT);
            const Problem sender = crowded_problem(context.num_ranks(), ncclBfloat16, CROSSDOCK_SUMS_SENDER);
            Group group(context, exact);
            Layer layer(context, group.get(), exact);
            for (int i = 0; i < 4; ++i) {
                const Problem& problem = i % 2 == 0 ? sender : exact;
                RANK_OK(context, crossdockHandleSetSums(layer.handle(), problem.sums));
                layer.refill(problem);
                layer.round_trip();
            }
        });
    });
}

TEST(Sums, TheEnvironmentChoosesForNewGroups) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        setenv("CROSSDOCK_SENDER_SUMS", "1", 1);
        expect_clean(spec, ranks_or(3), std::nullopt, [](RankContext& context) {
            Problem problem = crowded_problem(context.num_ranks(), ncclBfloat16, CROSSDOCK_SUMS_SENDER);
            Group group(context, problem);
            const std::vector<std::byte> asked_for = combined_with(context, group.get(), problem);
            // A layer of exact sums asks for nothing; what it gets is the environment's choice.
            problem.sums = CROSSDOCK_SUMS_EXACT;
            Layer layer(context, group.get(), problem);
            problem.sums = CROSSDOCK_SUMS_SENDER;
            layer.refill(problem);
            layer.round_trip();
            RANK_CHECK(context, layer.combined() == asked_for, "the environment did not choose");
        });
        unsetenv("CROSSDOCK_SENDER_SUMS");
    });
}

TEST(Sums, OnlyExpertMajorHandlesHaveAChoice) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            Problem problem = crowded_problem(context.num_ranks(), ncclBfloat16, CROSSDOCK_SUMS_EXACT);
            problem.layout = NCCL_EP_LAYOUT_RANK_MAJOR;
            Group group(context, problem);
            Layer layer(context, group.get(), problem);
            RANK_REFUSED(context, ncclInvalidUsage, "expert-major",
                         crossdockHandleSetSums(layer.handle(), CROSSDOCK_SUMS_SENDER));
            RANK_REFUSED(context, ncclInvalidArgument, "handle",
                         crossdockHandleSetSums(nullptr, CROSSDOCK_SUMS_SENDER));
            layer.round_trip();
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
