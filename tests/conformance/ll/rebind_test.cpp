// SPDX-License-Identifier: Apache-2.0
// Low latency: combines return rows of the routing that was dispatched. crossdockHandleRebind moves it, and leaves
// choices out; routing that was bound after the dispatch is refused.
#include <gtest/gtest.h>

#include "conformance/support/layer.h"
#include "conformance/support/options.h"
#include "reference/combine.h"

namespace crossdock::testing {
namespace {

using reference::combined_row;

// A rank's topk_idx in memory of its own.
class OwnIds {
  public:
    OwnIds(RankContext& context, const Layer& layer, const Problem& problem)
        : ids_(problem.ranks[context.rank()].ids),
          num_topk_(static_cast<size_t>(problem.num_topk)),
          buffer_(context, layer.stream(), (ids_.size() + 1) * sizeof(int64_t)) {
        buffer_.write(ids_.data(), ids_.size() * sizeof(int64_t));
    }

    size_t num_tokens() const { return ids_.size() / num_topk_; }
    ncclResult_t bind(const Layer& layer, size_t num_tokens) {
        Tensor tensor(ncclInt64, {num_tokens, num_topk_}, buffer_);
        return ncclEpUpdateHandle(layer.handle(), tensor, nullptr, layer.stream());
    }
    ncclResult_t rebind(const Layer& layer, size_t num_tokens) {
        Tensor tensor(ncclInt64, {num_tokens, num_topk_}, buffer_);
        return crossdockHandleRebind(layer.handle(), tensor);
    }
    ncclResult_t rebind(const Layer& layer) { return rebind(layer, num_tokens()); }

  private:
    std::vector<int64_t> ids_;
    size_t num_topk_;
    Buffer buffer_;
};

// Choices of a token are of different experts, so that all have a row, whatever is left out.
Problem with_distinct_choices(Problem problem) {
    for (reference::RankInput& rank : problem.ranks) {
        for (int i = 0; i < static_cast<int>(rank.ids.size()); ++i)
            rank.ids[i] = (i / problem.num_topk + i % problem.num_topk) % problem.num_experts;
    }
    return problem;
}

Problem without_some_choices(Problem problem) {
    for (reference::RankInput& rank : problem.ranks) {
        for (size_t i = 0; i < rank.ids.size(); i += 2) rank.ids[i] = -1;
    }
    return problem;
}

void check_sums(RankContext& context, const Layer& layer, const Problem& problem) {
    const Bytes seen = layer.combined();
    const size_t row_bytes = problem.combine_row_bytes();
    for (int token = 0; token < problem.ranks[context.rank()].num_tokens; ++token) {
        const Bytes expected = combined_row(problem, context.rank(), token);
        const auto* const row = &seen[static_cast<size_t>(token) * row_bytes];
        RANK_CHECK(context, std::equal(expected.begin(), expected.end(), row), "token {} differs", token);
    }
}

TEST(Rebind, SumsLeaveChoicesOut) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(3), std::nullopt, [](RankContext& context) {
            const Problem problem =
                with_distinct_choices(plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 7));
            const Problem fewer = without_some_choices(problem);
            Group group(context, problem);
            Layer layer(context, group.get(), problem);
            OwnIds all(context, layer, problem);
            OwnIds some(context, layer, fewer);
            layer.round_trip();
            for (OwnIds* const routing : {&some, &all, &some}) {
                RANK_OK(context, routing->rebind(layer));
                RANK_OK(context, layer.combine());
                check_sums(context, layer, routing == &all ? problem : fewer);
            }
            layer.route(problem);
            layer.round_trip();
        });
    });
}

TEST(Rebind, RoutingThatWasNotDispatchedIsRefused) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 8);
            Group group(context, problem);
            Layer layer(context, group.get(), problem);
            OwnIds routing(context, layer, problem);
            RANK_REFUSED(context, ncclInvalidUsage, "nothing was dispatched", routing.rebind(layer));
            layer.round_trip();
            for (const size_t num_tokens : {routing.num_tokens(), routing.num_tokens() / 2}) {
                RANK_OK(context, routing.bind(layer, num_tokens));
                RANK_REFUSED(context, ncclInvalidUsage, "last dispatch", layer.combine());
                RANK_REFUSED(context, ncclInvalidUsage, "last dispatch", routing.rebind(layer));
            }
            // Back to what was dispatched.
            layer.route(problem);
            RANK_OK(context, layer.combine());
            layer.check_combine();
        });
    });
}

// Every choice is of an expert of the rank that is `distance` after its own.
Problem with_choices_at(Problem problem, int distance) {
    const int experts = problem.num_experts / problem.num_ranks;
    for (int rank = 0; rank < problem.num_ranks; ++rank) {
        std::vector<int64_t>& ids = problem.ranks[rank].ids;
        const int first = (rank + distance) % problem.num_ranks * experts;
        for (int i = 0; i < static_cast<int>(ids.size()); ++i)
            ids[i] = first + (i / problem.num_topk + i % problem.num_topk) % experts;
    }
    return problem;
}

// Inside an LSA team rows return from where the dispatch has taken them, whatever the ids say now: the row of an
// earlier dispatch, which this rank had itself, is not taken for one of them. Of another team it would be awaited.
TEST(Rebind, RowsOfAnEarlierDispatchAreNotSummed) {
    if (!is_one_lsa_team(ranks_or(2))) return;
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 8);
            const Problem here = with_choices_at(problem, 0);
            const Problem elsewhere = with_choices_at(problem, 1);
            Group group(context, problem);
            Layer layer(context, group.get(), here);
            OwnIds ids_here(context, layer, here);
            layer.round_trip();
            layer.route(elsewhere);
            layer.round_trip();
            RANK_OK(context, ids_here.rebind(layer));
            RANK_OK(context, layer.combine());
            check_sums(context, layer, elsewhere);
        });
    });
}

TEST(Rebind, BadCalls) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 9);
            Group group(context, problem);
            Layer layer(context, group.get(), problem);
            OwnIds routing(context, layer, problem);
            layer.prepare_dispatch();
            RANK_OK(context, layer.send_dispatch());
            RANK_REFUSED(context, ncclInvalidUsage, "pending", routing.rebind(layer));
            RANK_OK(context, layer.complete());
            RANK_REFUSED(context, ncclInvalidArgument, "topk_idx", routing.rebind(layer, routing.num_tokens() + 1));
            RANK_REFUSED(context, ncclInvalidArgument, "at most", routing.bind(layer, (size_t{1} << 32) + 1));
            RANK_REFUSED(context, ncclInvalidArgument, "topk_idx", crossdockHandleRebind(layer.handle(), nullptr));
            RANK_REFUSED(context, ncclInvalidArgument, "handle", crossdockHandleRebind(nullptr, nullptr));
            RANK_OK(context, crossdockHandleSetSums(layer.handle(), CROSSDOCK_SUMS_SENDER));
            RANK_REFUSED(context, ncclInvalidUsage, "sender's sums", routing.rebind(layer));
            RANK_OK(context, crossdockHandleSetSums(layer.handle(), CROSSDOCK_SUMS_EXACT));
            RANK_OK(context, routing.rebind(layer));
            RANK_REFUSED(context, ncclInvalidUsage, "crossdockHandleRebind",
                         crossdockHandleSetSums(layer.handle(), CROSSDOCK_SUMS_SENDER));
            layer.prepare_combine();
            RANK_OK(context, layer.combine());
            layer.check_combine();

            problem.layout = NCCL_EP_LAYOUT_RANK_MAJOR;
            Layer other(context, group.get(), problem);
            other.round_trip();
            RANK_REFUSED(context, ncclInvalidUsage, "rank-major", routing.rebind(other));
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
