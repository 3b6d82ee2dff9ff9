// SPDX-License-Identifier: Apache-2.0
// Where the rows of a low-latency dispatch came from, as crossdockHandleSources tells: exact, in the order of source,
// token and k; not before the dispatch is finished. And where they went, as crossdockHandleRouting tells.
#include <gtest/gtest.h>

#include <cstring>

#include "conformance/support/layer.h"
#include "conformance/support/options.h"

namespace crossdock::testing {
namespace {

constexpr int32_t kUntouched = -77;

// Some tokens have the same expert twice, some drop a choice, and ranks have different numbers of tokens.
Problem uneven_problem(int num_ranks) {
    Problem problem;
    problem.num_ranks = num_ranks;
    problem.num_experts = 3 * num_ranks;
    problem.max_tokens = 8;
    problem.num_topk = 4;
    problem.hidden = problem.combine_hidden = 64;
    problem.ranks.resize(num_ranks);
    Random random(5);
    for (int rank = 0; rank < num_ranks; ++rank) {
        reference::RankInput& input = problem.ranks[rank];
        input.num_tokens = rank % 3 == 1 ? 0 : problem.max_tokens - rank % 2;
        for (int i = 0; i < input.num_tokens * problem.num_topk; ++i) {
            input.ids.push_back(i % 7 == 0 ? -1 : random.below(problem.num_experts));
            input.weights.push_back(static_cast<float>(random.unit()));
        }
    }
    return problem;
}

template <typename T>
std::vector<T> read_as(const Buffer& buffer) {
    const std::vector<std::byte> bytes = buffer.read();
    std::vector<T> values(bytes.size() / sizeof(T));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
}

class Sources {
  public:
    Sources(RankContext& context, const Layer& layer)
        : problem_(layer.problem()),
          context_(context),
          experts_(static_cast<size_t>(problem_.local_experts())),
          slots_(static_cast<size_t>(problem_.slots())),
          tokens_(context, layer.stream(), experts_ * slots_ * sizeof(int32_t)),
          ranges_(context, layer.stream(), experts_ * static_cast<size_t>(problem_.num_ranks) * sizeof(int64_t)) {}

    ncclResult_t ask(const Layer& layer) {
        const std::vector<int32_t> untouched(experts_ * slots_, kUntouched);
        tokens_.write(untouched.data(), untouched.size() * sizeof(int32_t));
        Tensor tokens(ncclInt32, {experts_, slots_}, tokens_);
        Tensor ranges(ncclInt64, {experts_, static_cast<size_t>(problem_.num_ranks)}, ranges_);
        return crossdockHandleSources(layer.handle(), tokens, ranges, layer.stream());
    }

    void check() const {
        std::vector<int32_t> tokens(experts_ * slots_, kUntouched);
        std::vector<int64_t> ranges;
        for (size_t expert = 0; expert < experts_; ++expert) {
            const int64_t id = context_.rank() * static_cast<int64_t>(experts_) + static_cast<int64_t>(expert);
            size_t at = 0;
            for (const reference::RankInput& source : problem_.ranks) {
                const size_t first = at;
                for (size_t i = 0; i < source.ids.size(); ++i) {
                    if (source.ids[i] != id || at == slots_) continue;
                    tokens[expert * slots_ + at++] = static_cast<int32_t>(i) / problem_.num_topk;
                }
                ranges.push_back(static_cast<int64_t>(first << 32 | (at - first)));
            }
        }
        RANK_CHECK(context_, read_as<int32_t>(tokens_) == tokens, "tokens differ");
        RANK_CHECK(context_, read_as<int64_t>(ranges_) == ranges, "ranges differ");
    }

  private:
    const Problem problem_;
    RankContext& context_;
    size_t experts_, slots_;
    Buffer tokens_, ranges_;
};

TEST(Sources, TokensAndRangesOfEveryDispatch) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(4), std::nullopt, [](RankContext& context) {
            const Problem problem = uneven_problem(context.num_ranks());
            Group group(context, problem);
            Layer layer(context, group.get(), problem);
            Sources sources(context, layer);
            RANK_REFUSED(context, ncclInvalidUsage, "no finished dispatch", sources.ask(layer));
            layer.round_trip();
            RANK_OK(context, sources.ask(layer));
            sources.check();
            layer.prepare_dispatch();
            RANK_OK(context, layer.send_dispatch());
            RANK_REFUSED(context, ncclInvalidUsage, "no finished dispatch", sources.ask(layer));
            RANK_OK(context, layer.complete());
            RANK_OK(context, sources.ask(layer));
            sources.check();
        });
    });
}

TEST(Sources, OnlyExpertMajorHandlesAndRightTensors) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            Problem problem = uneven_problem(context.num_ranks());
            Group group(context, problem);
            Layer layer(context, group.get(), problem);
            layer.round_trip();
            Buffer memory(context, layer.stream(), 4096);
            Tensor tokens(ncclInt32, {3, static_cast<size_t>(problem.slots())}, memory);
            Tensor ranges(ncclInt64, {3, static_cast<size_t>(problem.num_ranks)}, memory);
            Tensor narrow(ncclInt32, {3, static_cast<size_t>(problem.num_ranks)}, memory);
            RANK_REFUSED(context, ncclInvalidArgument, "tokens",
                         crossdockHandleSources(layer.handle(), nullptr, ranges, layer.stream()));
            RANK_REFUSED(context, ncclInvalidArgument, "ranges",
                         crossdockHandleSources(layer.handle(), tokens, narrow, layer.stream()));
            RANK_REFUSED(context, ncclInvalidArgument, "tokens",
                         crossdockHandleSources(layer.handle(), narrow, ranges, layer.stream()));
            RANK_REFUSED(context, ncclInvalidArgument, "handle",
                         crossdockHandleSources(nullptr, tokens, ranges, layer.stream()));
            problem.layout = NCCL_EP_LAYOUT_RANK_MAJOR;
            Layer other(context, group.get(), problem);
            RANK_REFUSED(context, ncclInvalidUsage, "expert-major",
                         crossdockHandleSources(other.handle(), tokens, ranges, layer.stream()));
        });
    });
}

// What was dispatched, from the send half on, also if the caller's memory holds other choices by then.
TEST(Routing, IsWhatWasDispatched) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(4), std::nullopt, [](RankContext& context) {
            Problem problem = uneven_problem(context.num_ranks());
            const std::vector<int64_t>& ids = problem.ranks[context.rank()].ids;
            const size_t topk = static_cast<size_t>(problem.num_topk), tokens = ids.size() / topk;
            Group group(context, problem);
            Layer layer(context, group.get(), problem);
            Buffer found(context, layer.stream(), (ids.size() + 1) * sizeof(int32_t));
            Tensor tensor(ncclInt32, {tokens, topk}, found);
            const auto ask = [&] { return crossdockHandleRouting(layer.handle(), tensor, layer.stream()); };
            const auto check = [&] {
                std::vector<int32_t> expected(ids.begin(), ids.end());
                expected.push_back(kUntouched);
                RANK_CHECK(context, read_as<int32_t>(found) == expected, "ids differ");
            };
            const std::vector<int32_t> untouched(ids.size() + 1, kUntouched);
            RANK_REFUSED(context, ncclInvalidUsage, "nothing was dispatched", ask());
            for (int i = 0; i < 3; ++i) {
                layer.prepare_dispatch();
                RANK_OK(context, layer.send_dispatch());
                const std::vector<int64_t> others(ids.size(), 0);
                Buffer other_ids(context, layer.stream(), (ids.size() + 1) * sizeof(int64_t));
                other_ids.write(others.data(), others.size() * sizeof(int64_t));
                found.write(untouched.data(), untouched.size() * sizeof(int32_t));
                RANK_OK(context, ask());
                check();
                RANK_OK(context, layer.complete());
                Tensor other(ncclInt64, {tokens, topk}, other_ids);
                RANK_OK(context, ncclEpUpdateHandle(layer.handle(), other, nullptr, layer.stream()));
                found.write(untouched.data(), untouched.size() * sizeof(int32_t));
                RANK_OK(context, ask());
                check();
                RANK_OK(context, layer.update());
                layer.round_trip();
            }
            Tensor wide(ncclInt64, {tokens, topk}, found);
            RANK_REFUSED(context, ncclInvalidArgument, "topk_idx",
                         crossdockHandleRouting(layer.handle(), wide, layer.stream()));
            RANK_REFUSED(context, ncclInvalidArgument, "topk_idx",
                         crossdockHandleRouting(layer.handle(), nullptr, layer.stream()));
            problem.layout = NCCL_EP_LAYOUT_RANK_MAJOR;
            Layer rank_major(context, group.get(), problem);
            RANK_REFUSED(context, ncclInvalidUsage, "expert-major",
                         crossdockHandleRouting(rank_major.handle(), tensor, rank_major.stream()));
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
