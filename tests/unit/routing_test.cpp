// SPDX-License-Identifier: Apache-2.0
// Routing counts: what plain loops say, for any number of blocks and warps.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "api/routing.h"
#include "crossdock.h"
#include "kernels/routing/count.h"
#include "runtime/cpu/local_executor.h"

namespace crossdock {
namespace {

constexpr uint32_t kTokens = 37, kTopk = 5, kRanks = 6, kNodeRanks = 2, kRankExperts = 3;
constexpr uint32_t kExperts = kRanks * kRankExperts;
constexpr LaunchShape kShapes[] = {{1, 1, 4096}, {6, 1, 4096}, {4, 3, 4096}};

template <typename Kernel>
void run(const LaunchShape& shape, Kernel&& kernel) {
    cpu::LocalExecutor(1).run(shape, [&](cpu::Warp& warp) { kernel(Ctx(warp)); });
}

std::vector<int64_t> random_ids() {
    std::mt19937 random(3);
    std::vector<int64_t> ids(kTokens * kTopk);
    for (int64_t& id : ids) id = static_cast<int64_t>(random() % (kExperts + 2)) - 2;
    return ids;
}

struct Counts {
    std::vector<int32_t> per_rank = std::vector<int32_t>(kRanks, -9);
    std::vector<int32_t> per_node = std::vector<int32_t>(kRanks / kNodeRanks, -9);
    std::vector<int32_t> per_expert = std::vector<int32_t>(kExperts, -9);
    std::vector<uint8_t> is_in_rank = std::vector<uint8_t>(kTokens * kRanks, 9);
    bool operator==(const Counts&) const = default;

    // ids by column: strides of any kind are allowed.
    crossdockRoutingCounts_t arguments(const std::vector<int64_t>& ids) {
        crossdockRoutingCounts_t c{};
        c.size = sizeof(c);
        c.magic = NCCL_EP_MAGIC;
        c.device = -1;
        c.id_type = ncclInt64;
        c.topk_idx = ids.data();
        c.token_stride = 1;
        c.choice_stride = kTokens;
        c.num_tokens = kTokens;
        c.num_topk = kTopk;
        c.num_experts = kExperts;
        c.num_ranks = kRanks;
        c.node_ranks = kNodeRanks;
        c.per_rank = per_rank.data();
        c.per_node = per_node.data();
        c.per_expert = per_expert.data();
        c.is_in_rank = is_in_rank.data();
        return c;
    }

    static Counts expected(const std::vector<int64_t>& ids) {
        Counts counts;
        for (auto* values : {&counts.per_rank, &counts.per_node, &counts.per_expert}) {
            std::fill(values->begin(), values->end(), 0);
        }
        for (uint32_t token = 0; token < kTokens; ++token) {
            std::vector<int32_t> nodes(kRanks / kNodeRanks, 0);
            uint8_t* ranks = counts.is_in_rank.data() + token * kRanks;
            std::fill_n(ranks, kRanks, uint8_t{0});
            for (uint32_t k = 0; k < kTopk; ++k) {
                const int64_t id = ids[k * kTokens + token];
                if (id < 0) continue;
                ++counts.per_expert[static_cast<size_t>(id)];
                ranks[id / kRankExperts] = 1;
                nodes[static_cast<size_t>(id) / (kRankExperts * kNodeRanks)] = 1;
            }
            for (uint32_t rank = 0; rank < kRanks; ++rank) counts.per_rank[rank] += ranks[rank];
            for (uint32_t node = 0; node < nodes.size(); ++node) counts.per_node[node] += nodes[node];
        }
        return counts;
    }
};

TEST(Routing, RoutingIsCountedByAnyNumberOfBlocks) {
    const std::vector<int64_t> ids = random_ids();
    const Counts expected = Counts::expected(ids);
    for (const LaunchShape& shape : kShapes) {
        Counts counts;
        const crossdockRoutingCounts_t arguments = counts.arguments(ids);
        run(shape, [&](const Ctx& ctx) { count_routing(ctx, arguments); });
        EXPECT_EQ(counts, expected) << shape.num_blocks << " blocks";
    }
    Counts counts;
    const crossdockRoutingCounts_t arguments = counts.arguments(ids);
    EXPECT_EQ(crossdockCountRouting(&arguments, nullptr), ncclSuccess);
    EXPECT_EQ(counts, expected);
}

// Numbers of no expert, in tensors that may have come from other ranks, at every end of their range.
constexpr int64_t kNobodys[] = {-1,        kExperts,           INT32_MAX, int64_t{1} << 32, (int64_t{1} << 32) + 3,
                                INT64_MAX, int64_t{INT32_MIN}, INT64_MIN, INT64_MIN + 3,    -(int64_t{1} << 32) + 3};

TEST(Routing, NumbersOfNoExpertAreNotCounted) {
    std::vector<int64_t> ids = random_ids();
    std::vector<int64_t> known = ids;
    for (size_t i = 0; i < ids.size(); i += 3) {
        ids[i] = kNobodys[i / 3 % std::size(kNobodys)];
        known[i] = -1;
    }
    for (const LaunchShape& shape : kShapes) {
        Counts counts;
        const crossdockRoutingCounts_t arguments = counts.arguments(ids);
        run(shape, [&](const Ctx& ctx) { count_routing(ctx, arguments); });
        EXPECT_EQ(counts, Counts::expected(known)) << shape.num_blocks << " blocks";
    }
}

TEST(Routing, WrongArgumentsAreRefusedWithMessages) {
    const std::vector<int64_t> ids = random_ids();
    Counts counts;
    auto is_refused = [&](auto&& change, const char* message) {
        crossdockRoutingCounts_t arguments = counts.arguments(ids);
        change(arguments);
        return crossdockCountRouting(&arguments, nullptr) == ncclInvalidArgument &&
               std::strstr(crossdockGetLastError(), message) != nullptr;
    };
    EXPECT_TRUE(is_refused([](auto& c) { c.size = 8; }, "counts->size is 8"));
    EXPECT_TRUE(is_refused([](auto& c) { c.device = -2; }, "device is -2, allowed"));
    EXPECT_TRUE(is_refused([](auto& c) { c.id_type = ncclFloat32; }, "id_type is 7, allowed: ncclInt32"));
    EXPECT_TRUE(is_refused([](auto& c) { c.num_experts = 7; }, "num_experts is 7, allowed: positive multiples of"));
    EXPECT_TRUE(is_refused([](auto& c) { c.node_ranks = 4; }, "node_ranks is 4, allowed: divisors of num_ranks (6)"));
    EXPECT_TRUE(is_refused([](auto& c) { c.per_rank = nullptr; }, "per_rank is NULL"));
    EXPECT_TRUE(is_refused([&](auto& c) { c.topk_idx = reinterpret_cast<const std::byte*>(ids.data()) + 4; },
                           "expected a multiple of 8"));
}

}  // namespace
}  // namespace crossdock
