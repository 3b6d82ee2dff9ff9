// SPDX-License-Identifier: Apache-2.0
// The high-throughput reference against values that can be worked out by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "formats.h"
#include "ht_combine.h"

namespace crossdock::reference {
namespace {

// Two ranks, two experts each. Rank 0's tokens go to experts {3, 2} and {0, 3}, rank 1's to {2, 2} and {-1, 4}, which
// are two choices of one expert and none.
Problem small_problem(ncclEpLayout_t layout) {
    Problem problem{.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT};
    problem.num_ranks = 2;
    problem.num_experts = 4;
    problem.max_tokens = 2;
    problem.num_topk = 2;
    problem.layout = layout;
    problem.budget = 64;
    problem.combine_type = ncclFloat32;
    problem.combine_hidden = 4;
    problem.ranks = {{2, {3, 2, 0, 3}, {0.5f, 0.25f, 1.0f, 2.0f}}, {2, {2, 2, -1, 4}, {1.0f, 4.0f, 3.0f, 5.0f}}};
    return problem;
}

std::string shown(const std::vector<RowSource>& rows) {
    std::string text;
    for (const RowSource& row : rows)
        text += row.is_padding() ? "- " : std::to_string(row.source) + "." + std::to_string(row.token) + " ";
    return text;
}

TEST(HtReference, FlatRowsAreOneATokenInOrder) {
    const Problem problem = small_problem(NCCL_EP_LAYOUT_FLAT);
    const HtRouting routing(problem);
    EXPECT_EQ(shown(routing.received(0).rows), "0.1 ");
    EXPECT_EQ(shown(routing.received(1).rows), "0.0 0.1 1.0 ");
    EXPECT_EQ(routing.received(1).total, 3u);
    EXPECT_EQ(routing.received(0).counters, (std::vector<int64_t>{1, 0}));
    EXPECT_EQ(routing.received(1).counters, (std::vector<int64_t>{2, 2}));
    const Metadata both = metadata_of(problem, 1, {0, 0, 0});
    EXPECT_EQ(both.ids, (std::vector<int64_t>{0, 1}));  // ascending, not as the token chose
    EXPECT_EQ(both.weights, (std::vector<float>{0.25f, 0.5f}));
    const Metadata duplicate = metadata_of(problem, 1, {1, 0, 0});
    EXPECT_EQ(duplicate.ids, (std::vector<int64_t>{0, -1}));
    EXPECT_EQ(duplicate.weights, (std::vector<float>{4.0f, 0.0f}));
    Problem global = problem;
    global.id_kind = NCCL_EP_EXPERT_ID_GLOBAL;
    EXPECT_EQ(metadata_of(global, 1, {0, 0, 0}).ids, (std::vector<int64_t>{2, 3}));
}

TEST(HtReference, ZonesArePaddedAndEmptyOnesAreNone) {
    Problem problem = small_problem(NCCL_EP_LAYOUT_EXPERT_MAJOR);
    problem.alignment = 4;
    const HtRouting routing(problem);
    EXPECT_EQ(shown(routing.received(0).rows), "0.1 - - - ");
    EXPECT_EQ(routing.received(0).counters, (std::vector<int64_t>{4, 0}));
    EXPECT_EQ(routing.received(0).offsets, (std::vector<int64_t>{0, 4}));
    EXPECT_EQ(shown(routing.received(1).rows), "0.0 1.0 - - 0.0 0.1 - - ");
    EXPECT_EQ(routing.received(1).offsets, (std::vector<int64_t>{0, 4}));
    EXPECT_EQ(routing.received(1).total, 8u);
    problem.alignment = 1;
    EXPECT_EQ(shown(HtRouting(problem).received(1).rows), "0.0 1.0 0.0 0.1 ");
}

TEST(HtReference, WhatIsPastTheBudgetIsDropped) {
    Problem problem = small_problem(NCCL_EP_LAYOUT_EXPERT_MAJOR);
    problem.alignment = 4;
    problem.budget = 6;
    const HtRouting routing(problem);
    EXPECT_TRUE(routing.overflows());
    EXPECT_EQ(shown(routing.received(1).rows), "0.0 1.0 - - 0.0 0.1 ");
    EXPECT_EQ(routing.received(1).counters, (std::vector<int64_t>{4, 2}));
    EXPECT_EQ(routing.received(1).total, 8u);
    problem.budget = 3;
    const HtRouting tight(problem);
    EXPECT_EQ(tight.received(1).counters, (std::vector<int64_t>{3, 0}));
    EXPECT_EQ(tight.received(1).offsets, (std::vector<int64_t>{0, 3}));
    EXPECT_EQ(tight.arrivals(0, 0).size(), 1u);  // expert 2 only
    Problem flat = small_problem(NCCL_EP_LAYOUT_FLAT);
    flat.budget = 2;
    const HtRouting two(flat);
    EXPECT_EQ(two.received(1).total, 3u);
    EXPECT_EQ(two.received(1).counters, (std::vector<int64_t>{1, 2}));
    EXPECT_TRUE(two.arrivals(1, 0).empty());
    EXPECT_EQ(combined_row(flat, two, 1, 0), std::vector<std::byte>(16, std::byte{0}));
    EXPECT_EQ(combined_weights(flat, two, 1, 0), (std::vector<float>{0, 0}));
}

TEST(HtReference, CombineAddsRowsAndReturnsWeights) {
    for (const ncclEpLayout_t layout : {NCCL_EP_LAYOUT_FLAT, NCCL_EP_LAYOUT_EXPERT_MAJOR}) {
        const Problem problem = small_problem(layout);
        const HtRouting routing(problem);
        const std::vector<std::byte> row = combined_row(problem, routing, 0, 1);
        const std::vector<std::byte> a = expert_row(problem, 0, {0, 1, 0});
        const std::vector<std::byte> b = expert_row(problem, 1, {0, 1, 1});
        const BoundedRow bounded = bounded_row(problem, routing, 0, 1);
        for (int i = 0; i < 4; ++i) {
            const float sum = decode(ncclFloat32, &a[i * 4]) + decode(ncclFloat32, &b[i * 4]);
            EXPECT_EQ(decode(ncclFloat32, &row[i * 4]), sum);
            EXPECT_LE(std::fabs(sum - bounded.sum[i]), bounded.bound[i]);
        }
        EXPECT_EQ(combined_weights(problem, routing, 0, 0),
                  (std::vector<float>{weight_gradient(problem, 1, 0, 0, 1), weight_gradient(problem, 1, 0, 0, 0)}));
        const std::vector<float> duplicates = combined_weights(problem, routing, 1, 0);
        EXPECT_EQ(duplicates[0], duplicates[1]);
        EXPECT_NE(duplicates[0], 0.0f);
        EXPECT_EQ(combined_weights(problem, routing, 1, 1), (std::vector<float>{0, 0}));
    }
}

}  // namespace
}  // namespace crossdock::reference
