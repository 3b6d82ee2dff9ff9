// SPDX-License-Identifier: Apache-2.0
// High throughput: every routing of 2 ranks with one or two experts each, one or two tokens and K 1 or 2, ids -1
// included, is dispatched and combined correctly, with room for all rows and with a budget that drops some.
#include <gtest/gtest.h>

#include <numeric>

#include "conformance/support/layer.h"
#include "conformance/support/options.h"

namespace crossdock::testing {
namespace {

struct Shape {
    int local_experts;
    int num_tokens;
    int num_topk;
    int stride = 1;  // of the pairs of routings: a sample where there are too many
};

constexpr int kRanks = 2;

Problem empty_problem(const Shape& shape, ncclEpLayout_t layout, bool drops) {
    Problem problem{.algorithm = kHighThroughput};
    problem.num_ranks = kRanks;
    problem.num_experts = kRanks * shape.local_experts;
    problem.max_tokens = shape.num_tokens;
    problem.num_topk = shape.num_topk;
    problem.layout = layout;
    problem.index_type = ncclInt32;
    problem.token_type = problem.combine_type = ncclFloat32;
    problem.hidden = problem.combine_hidden = 4;
    problem.alignment = layout == NCCL_EP_LAYOUT_EXPERT_MAJOR && drops ? 2 : 1;
    problem.drops = drops;
    problem.budget = drops ? static_cast<size_t>(shape.num_tokens) : problem.most_rows();
    problem.ranks.resize(kRanks);
    for (reference::RankInput& rank : problem.ranks) {
        rank.num_tokens = shape.num_tokens;
        for (int i = 0; i < shape.num_tokens * shape.num_topk; ++i)
            rank.weights.push_back(0.25f + 0.5f * static_cast<float>(i));
    }
    return problem;
}

// Routing number `number` of all ranks.
void set_routing(Problem& problem, int64_t number) {
    for (reference::RankInput& rank : problem.ranks) {
        rank.ids.clear();
        for (size_t i = 0; i < rank.weights.size(); ++i, number /= problem.num_experts + 1)
            rank.ids.push_back(number % (problem.num_experts + 1) - 1);
    }
}

// All routings, or every `stride`th of them in an order that mixes those of both ranks.
void enumerate(const BackendSpec& spec, const Shape& shape, ncclEpLayout_t layout, bool drops, int sparser) {
    expect_clean(spec, kRanks, std::nullopt, [=](RankContext& context) {
        Problem problem = empty_problem(shape, layout, drops);
        int64_t count = 1;
        for (int i = 0; i < kRanks * shape.num_tokens * shape.num_topk; ++i) count *= problem.num_experts + 1;
        int64_t stride = int64_t{shape.stride} * sparser;
        while (std::gcd(stride, count) != 1) ++stride;
        set_routing(problem, 0);
        Group group(context, problem);
        Layer layer(context, group.get(), problem);
        for (int64_t number = 0; number < count && context.failures().empty(); number += stride) {
            set_routing(problem, number);
            problem.seed = static_cast<uint64_t>(number);
            layer.route(problem);
            layer.round_trip();
            RANK_CHECK(context, context.failures().empty(), "routing number {}", number);
        }
    });
}

// Where the same kernels run on other memory or slower: a sample.
int sparser_in(Backend kind) { return kind == Backend::kThreads ? 1 : is_cuda(kind) ? 49 : 5; }

void enumerate_all(ncclEpLayout_t layout) {
    // --seeds 100: a hundredth of all.
    const int sparser = static_cast<int>(options().num_seeds.value_or(1));
    on_each_backend(kEveryBackend, [&](const BackendSpec& spec) {
        for (const Shape& shape : {Shape{2, 1, 2}, Shape{2, 2, 1}, Shape{1, 2, 2}, Shape{2, 2, 2, 151}}) {
            for (const bool drops : {false, true}) {
                enumerate(spec, shape, layout, drops, sparser * sparser_in(spec.kind));
                if (::testing::Test::HasFailure()) return;
            }
        }
    });
}

TEST(HtExhaustive, Flat) { enumerate_all(NCCL_EP_LAYOUT_FLAT); }

TEST(HtExhaustive, ExpertMajor) { enumerate_all(NCCL_EP_LAYOUT_EXPERT_MAJOR); }

}  // namespace
}  // namespace crossdock::testing
