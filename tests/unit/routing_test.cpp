// SPDX-License-Identifier: Apache-2.0
// Routing counts and packed routing: what plain loops say, for any number of blocks and warps.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "crossdock.h"
#include "kernels/routing/count.h"
#include "kernels/routing/pack.h"
#include "kernels/routing/unpack.h"
#include "runtime/cpu/local_executor.h"

namespace crossdock {
namespace {

constexpr uint32_t kTokens = 37, kTopk = 5, kRanks = 6, kNodeRanks = 2, kRankExperts = 3, kScales = 3;
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

template <typename Struct>
Struct begin_struct() {
    Struct made{};
    made.size = sizeof(Struct);
    made.magic = NCCL_EP_MAGIC;
    made.device = -1;
    made.id_type = ncclInt64;
    return made;
}

struct Counts {
    std::vector<int32_t> per_rank = std::vector<int32_t>(kRanks, -9);
    std::vector<int32_t> per_node = std::vector<int32_t>(kRanks / kNodeRanks, -9);
    std::vector<int32_t> per_expert = std::vector<int32_t>(kExperts, -9);
    std::vector<uint8_t> is_in_rank = std::vector<uint8_t>(kTokens * kRanks, 9);
    bool operator==(const Counts&) const = default;

    // ids by column: strides of any kind are allowed.
    crossdockRoutingCounts_t arguments(const std::vector<int64_t>& ids) {
        auto c = begin_struct<crossdockRoutingCounts_t>();
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

// Tokens' routing, packed and unpacked again as that of rows of rank 1, in two zones of one source each.
struct RoundTrip {
    static constexpr uint32_t kWords = 16, kFirst = kRankExperts, kNumReceived = kTokens - 4, kAlignment = 4;
    std::vector<int64_t> ids = random_ids();  // by row
    std::vector<float> weights = std::vector<float>(kTokens * kTopk);
    std::vector<uint32_t> scales = std::vector<uint32_t>(kTokens * kScales);
    std::vector<uint32_t> words = std::vector<uint32_t>(kTokens * kWords, 9);
    std::vector<int32_t> targets = std::vector<int32_t>(kTokens * kTopk, 9);
    std::vector<int32_t> counts = std::vector<int32_t>(kRankExperts + 1, 9);

    RoundTrip() {
        std::iota(weights.begin(), weights.end(), 0.5F);
        std::iota(scales.begin(), scales.end(), 1000);
    }

    crossdockRoutingSent_t sent() {
        auto l = begin_struct<crossdockRoutingSent_t>();
        l.topk_idx = ids.data();
        l.token_stride = kTopk;
        l.choice_stride = 1;
        l.num_tokens = kTokens;
        l.num_topk = kTopk;
        l.weights = weights.data();
        l.weight_strides[0] = kTopk;
        l.weight_strides[1] = 1;
        l.scales = scales.data();
        l.num_scales = kScales;
        l.scale_strides[0] = 1;  // by column
        l.scale_strides[1] = kTokens;
        l.first_number = 100;
        l.num_words = kWords;
        l.words = words.data();
        l.targets = targets.data();
        l.num_targets = kTopk;
        l.rank_experts = kRankExperts;
        l.zeros = counts.data();
        l.num_zeros = kRankExperts + 1;
        return l;
    }
};

TEST(Routing, TargetsAreTheRanksOfChoicesOrTheFirstOfAMask) {
    RoundTrip trip;
    crossdockRoutingSent_t sent = trip.sent();
    ASSERT_EQ(crossdockPackRouting(&sent, nullptr), ncclSuccess) << crossdockGetLastError();
    for (size_t i = 0; i < trip.ids.size(); ++i) {
        EXPECT_EQ(trip.targets[i], trip.ids[i] < 0 ? -1 : trip.ids[i] / kRankExperts);
    }
    std::vector<uint8_t> mask(kTokens * kRanks, 0);
    mask[0 * kRanks + 4] = mask[1 * kRanks + 0] = mask[1 * kRanks + 5] = 1;
    std::fill_n(mask.begin() + 2 * kRanks, kRanks, uint8_t{1});
    sent.is_in_rank = mask.data();
    sent.num_ranks = kRanks;
    for (const LaunchShape& shape : kShapes) {
        run(shape, [&](const Ctx& ctx) { pack_routing(ctx, sent); });
        const std::vector<int32_t> expected{4, -1, -1, -1, -1, 0, 5, -1, -1, -1, 0, 1, 2, 3, 4, -1, -1, -1, -1, -1};
        EXPECT_EQ(std::vector<int32_t>(trip.targets.begin(), trip.targets.begin() + 4 * kTopk), expected);
    }
}

// An expert id that does not fit is no expert's, instead of that of its lower bits.
TEST(Routing, NumbersOutOfRangeBelongToNoRank) {
    RoundTrip trip;
    std::fill(trip.ids.begin(), trip.ids.end(), (int64_t{1} << 32) + 3);
    trip.ids[1] = INT64_MIN;
    trip.ids[2] = INT64_MAX;
    const crossdockRoutingSent_t sent = trip.sent();
    ASSERT_EQ(crossdockPackRouting(&sent, nullptr), ncclSuccess) << crossdockGetLastError();
    EXPECT_EQ(trip.targets, std::vector<int32_t>(kTokens * kTopk, -1));
    for (uint32_t k = 0; k < kTopk; ++k) EXPECT_EQ(trip.words[1 + k], UINT32_MAX);
}

// Garbage that a rank may send causes no access outside of the tensors; sanitizers check that.
TEST(Routing, GarbageStaysInside) {
    std::mt19937 random(11);
    for (int round = 0; round < 40; ++round) {
        std::vector<uint32_t> words(kTokens * RoundTrip::kWords);
        for (uint32_t& word : words) word = round % 2 == 0 ? random() : random() % (kExperts + 3) - 2;
        std::vector<int32_t> ids(kTokens * kTopk), numbers(kTokens), ends(kRankExperts), counts(kRankExperts + 1);
        std::vector<int32_t> sources(kTokens * (kTopk + 2)), rank_ends(kRanks);
        std::vector<float> weights(kTokens * kTopk);
        const int32_t received = static_cast<int32_t>(random());
        auto came = begin_struct<crossdockRoutingReceived_t>();
        came.id_type = ncclInt32;
        came.words = words.data();
        came.num_rows = kTokens;
        came.received = &received;
        came.num_words = RoundTrip::kWords;
        came.num_topk = kTopk;
        came.has_weights = 1;
        came.first_expert = RoundTrip::kFirst;
        came.rank_experts = kRankExperts;
        came.ids = ids.data();
        came.weights = weights.data();
        came.numbers = numbers.data();
        came.sources = sources.data();
        came.counts = counts.data();
        came.alignment = RoundTrip::kAlignment;
        came.ends = ends.data();
        came.rank_ends = rank_ends.data();
        came.num_ranks = kRanks;
        came.rank_numbers = kTokens;
        ASSERT_EQ(crossdockUnpackRouting(&came, nullptr), ncclSuccess) << crossdockGetLastError();
        for (const int32_t id : ids) EXPECT_TRUE(id >= -1 && id < static_cast<int32_t>(kRankExperts)) << id;
        for (const int32_t end : rank_ends) EXPECT_TRUE(end >= 0 && end <= static_cast<int32_t>(kTokens)) << end;
    }
}

TEST(Routing, RoundTrips) {
    for (const LaunchShape& shape : kShapes) {
        RoundTrip trip;
        const crossdockRoutingSent_t sent = trip.sent();
        run(shape, [&](const Ctx& ctx) { pack_routing(ctx, sent); });
        EXPECT_EQ(trip.counts, std::vector<int32_t>(kRankExperts + 1, 0));
        EXPECT_EQ(trip.words[RoundTrip::kWords - 1], 0U);

        std::vector<int32_t> ids(kTokens * kTopk, 9), more_ids = ids, numbers(kTokens, 9), ends(kRankExperts, 9);
        std::vector<int32_t> sources(kTokens * (kTopk + 2), 9), rank_ends(3, 9);
        std::vector<float> weights(kTokens * kTopk);
        std::vector<uint32_t> scales(kTokens * kScales);
        const int32_t received = RoundTrip::kNumReceived;
        auto came = begin_struct<crossdockRoutingReceived_t>();
        came.id_type = ncclInt32;
        came.words = trip.words.data();
        came.num_rows = kTokens;
        came.received = &received;
        came.num_words = RoundTrip::kWords;
        came.num_topk = kTopk;
        came.num_scales = kScales;
        came.has_weights = 1;
        came.first_expert = RoundTrip::kFirst;
        came.rank_experts = kRankExperts;
        came.ids = ids.data();
        came.more_ids = more_ids.data();
        came.weights = weights.data();
        came.zero_foreign_weights = 1;
        came.numbers = numbers.data();
        came.sources = sources.data();
        came.scales = scales.data();
        came.scale_strides[0] = 1;
        came.scale_strides[1] = kTokens;
        came.counts = trip.counts.data();
        came.ends = ends.data();
        came.ends_of_rows = shape.num_blocks == 1 ? 0 : 1;
        came.alignment = RoundTrip::kAlignment;
        came.rank_ends = rank_ends.data();
        came.num_ranks = 3;
        came.rank_numbers = 60;
        run(shape, [&](const Ctx& ctx) { unpack_routing(ctx, came); });

        std::vector<int32_t> counts(kRankExperts, 0);
        for (uint32_t i = 0; i < kTokens * kTopk; ++i) {
            const int64_t own = trip.ids[i] - RoundTrip::kFirst;
            const bool is_here = own >= 0 && own < kRankExperts && i < RoundTrip::kNumReceived * kTopk;
            EXPECT_EQ(ids[i], is_here ? own : -1);
            EXPECT_EQ(weights[i], is_here ? trip.weights[i] : 0.0F);
            if (is_here) ++counts[static_cast<size_t>(own)];
        }
        EXPECT_EQ(more_ids, ids);
        EXPECT_EQ(scales, trip.scales);
        EXPECT_EQ(numbers[7], 107);
        EXPECT_EQ(std::vector<int32_t>(sources.begin(), sources.begin() + 3), (std::vector<int32_t>{100, 0, -1}));
        EXPECT_EQ(rank_ends, (std::vector<int32_t>{0, 20, received}));
        int32_t begin = 0;
        for (uint32_t expert = 0; expert < kRankExperts; ++expert) {
            EXPECT_EQ(trip.counts[expert], counts[expert]);
            const int32_t end = begin + (counts[expert] + 3) / 4 * 4;
            EXPECT_EQ(ends[expert], came.ends_of_rows != 0 ? begin + counts[expert] : end);
            begin = end;
        }
    }
}

TEST(Routing, EndsBeyondWhatTheirTypeHoldsAreItsLargest) {
    const std::vector<uint32_t> words = {0, 0, 1, 0};  // number 0, and choices 0, 1, 0
    std::vector<int32_t> counts(3, 0), ends(2, 9);
    auto came = begin_struct<crossdockRoutingReceived_t>();
    came.id_type = ncclInt32;
    came.words = words.data();
    came.num_rows = came.num_received = 1;
    came.num_words = 4;
    came.num_topk = 3;
    came.rank_experts = 2;
    came.counts = counts.data();
    came.ends = ends.data();
    const auto ends_with = [&](unsigned int alignment, int of_rows) {
        std::fill(counts.begin(), counts.end(), 0);
        came.alignment = alignment;
        came.ends_of_rows = of_rows;
        EXPECT_EQ(crossdockUnpackRouting(&came, nullptr), ncclSuccess) << crossdockGetLastError();
        return ends;
    };
    EXPECT_EQ(ends_with(4, 0), (std::vector<int32_t>{4, 8}));
    EXPECT_EQ(ends_with(1U << 30, 0), (std::vector<int32_t>{1 << 30, INT32_MAX}));
    EXPECT_EQ(ends_with(1U << 30, 1), (std::vector<int32_t>{2, (1 << 30) + 1}));
    EXPECT_EQ(ends_with(INT32_MAX, 0), (std::vector<int32_t>{INT32_MAX, INT32_MAX}));
}

// The names of before 0.3.
TEST(Routing, DeprecatedNamesPackAndUnpack) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    RoundTrip trip;
    const crossdockLabelsSent_t sent = trip.sent();
    EXPECT_EQ(crossdockPackLabels(&sent, nullptr), ncclSuccess) << crossdockGetLastError();
    EXPECT_EQ(trip.words[0], 100U);
    EXPECT_EQ(crossdockUnpackLabels(nullptr, nullptr), ncclInvalidArgument);
    EXPECT_STREQ(crossdockGetLastError(), "routing is NULL");
#pragma GCC diagnostic pop
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
    EXPECT_EQ(crossdockPackRouting(nullptr, nullptr), ncclInvalidArgument);
    RoundTrip trip;
    crossdockRoutingSent_t sent = trip.sent();
    sent.num_words = 13;
    EXPECT_EQ(crossdockPackRouting(&sent, nullptr), ncclInvalidArgument);
    EXPECT_STREQ(crossdockGetLastError(), "num_words is 13, allowed: 14..1048576");
    auto came = begin_struct<crossdockRoutingReceived_t>();
    came.num_words = 4;
    came.weights = trip.weights.data();
    EXPECT_EQ(crossdockUnpackRouting(&came, nullptr), ncclInvalidArgument);
    EXPECT_NE(std::strstr(crossdockGetLastError(), "weights is not NULL, expected NULL with has_weights 0"), nullptr);
}

}  // namespace
}  // namespace crossdock
