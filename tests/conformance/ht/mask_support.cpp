// SPDX-License-Identifier: Apache-2.0
#include "conformance/ht/mask_support.h"

#include "conformance/support/modes.h"

namespace crossdock::testing {

namespace {

// What is left of the problem for rank `own`: rows of `counted` ranks come, own rows go to `reached` ones.
Problem view_of(const Problem& problem, int own, const ActiveRanks& counted, const ActiveRanks& reached) {
    Problem view = problem;
    for (int rank = 0; rank < problem.num_ranks; ++rank) {
        reference::RankInput& input = view.ranks[static_cast<size_t>(rank)];
        if (rank != own && counted[static_cast<size_t>(rank)] == 0) {
            input = {};
        }
        for (int64_t& id : input.ids) {
            const int64_t target = id / problem.local_experts();
            if (rank == own && id >= 0 && reached[static_cast<size_t>(target)] == 0) id = -1;
        }
    }
    return view;
}

// All ways to be between two masks: of the ranks that were active before and are no more, some.
std::vector<ActiveRanks> between(const ActiveRanks& before, const ActiveRanks& after) {
    std::vector<ActiveRanks> ways{after};
    for (size_t rank = 0; rank < before.size(); ++rank) {
        if (before[rank] == after[rank]) continue;
        const size_t num = ways.size();
        for (size_t i = 0; i < num; ++i) {
            ways.push_back(ways[i]);
            ways.back()[rank] = before[rank];
        }
    }
    return ways;
}

}  // namespace

Problem mask_problem(int num_ranks, ncclEpLayout_t layout, uint64_t seed) {
    Problem problem = busy_problem(num_ranks, layout, seed);
    problem.algorithm = kHighThroughput;
    problem.max_tokens = 1 << (num_ranks - 1);
    Random random(seed + 1);
    for (int rank = 0; rank < num_ranks; ++rank) {
        reference::RankInput& input = problem.ranks[static_cast<size_t>(rank)];
        input = {};
        input.num_tokens = 1 << rank;
        for (int i = 0; i < input.num_tokens * num_ranks; ++i) {
            input.ids.push_back((i % num_ranks) * 2 + random.below(2));
            input.weights.push_back(static_cast<float>(random.unit()) + 0.25f);
        }
    }
    problem.budget = problem.most_rows();
    return problem;
}

OwnedGroup try_mask_group(RankContext& context, const Problem& problem, uint64_t timeout_ns) {
    ncclEpGroupConfig_t config = group_config_for(context, problem);
    config.timeout_ns = timeout_ns;
    crossdockGroupOptions_t options = CROSSDOCK_GROUP_OPTIONS_INIT;
    options.ht_masks = 1;
    ncclEpGroup_t group = nullptr;
    return OwnedGroup(crossdockCreateGroup(&group, context.comm(), &config, &options) == ncclSuccess ? group : nullptr);
}

OwnedGroup mask_group(RankContext& context, const Problem& problem, uint64_t timeout_ns) {
    OwnedGroup group = try_mask_group(context, problem, timeout_ns);
    RANK_CHECK(context, group != nullptr, "no group: {}", crossdockGetLastError());
    return group;
}

ActiveRanks all_but(int num_ranks, std::initializer_list<int> ranks) {
    ActiveRanks active(static_cast<size_t>(num_ranks), 1);
    for (const int rank : ranks) active[static_cast<size_t>(rank)] = 0;
    return active;
}

DegradedLayer::DegradedLayer(RankContext& context, ncclEpGroup_t group, const Problem& problem,
                             const LayerOptions& options)
    : context_(context), group_(group), problem_(problem), layer_(context, group, problem, [&] {
          LayerOptions own = options;
          own.peers_may_die = true;
          own.without_update = true;
          return own;
      }()) {}

void DegradedLayer::run(int phase) {
    const auto [operation, direction] = phases_of(kHighThroughput)[static_cast<size_t>(phase)];
    if (operation == Phase::kUpdate) return update();
    operation == Phase::kDispatch ? dispatch(direction) : combine(direction);
}

void DegradedLayer::step() {
    for (int phase = 0; phase < kMaskPhases; ++phase) run(phase);
}

void DegradedLayer::update() {
    const ActiveRanks before = mask();
    layer_.refill(problem_);
    layer_.prepare_update();
    RANK_OK(context_, layer_.update());
    context_.synchronize(layer_.stream());
    reached_ = mask();
    // Of a rank that was lost meanwhile, all rows are counted or none.
    for (const ActiveRanks& counted : between(before, reached_)) {
        counted_ = counted;
        layer_.expect(view_of(problem_, context_.rank(), counted_, reached_));
        if (static_cast<int64_t>(layer_.routing().received(context_.rank()).total) == layer_.updated_total()) break;
    }
    layer_.check_update();
    check_dropped();
}

void DegradedLayer::check_dropped() {
    uint64_t expected = 0;
    for (size_t rank = 0; rank < reached_.size(); ++rank) {
        // Every token goes to every rank.
        if (reached_[rank] == 0) expected += static_cast<uint64_t>(problem_.ranks[context_.rank()].num_tokens);
    }
    const cudaStream_t stream = layer_.stream();
    Buffer count(context_, stream, sizeof(uint64_t));
    RANK_OK(context_, crossdockHandleDroppedTokens(layer_.handle(), reinterpret_cast<uint64_t*>(count.data()), stream));
    uint64_t dropped = 0;
    context_.copy_to_host(&dropped, count.data(), sizeof dropped, stream);
    count.check_guards("the number of dropped tokens");
    RANK_CHECK(context_, dropped == expected, "{} tokens are dropped, expected {}", dropped, expected);
}

void DegradedLayer::dispatch(ncclEpPassDir_t direction) {
    layer_.prepare_dispatch();
    RANK_OK(context_, layer_.dispatch(direction));
    context_.synchronize(layer_.stream());
    layer_.check_dispatch(direction, mask());
}

void DegradedLayer::combine(ncclEpPassDir_t direction) {
    layer_.prepare_combine();
    const auto limited = [&](ActiveRanks active) {
        for (size_t rank = 0; rank < active.size(); ++rank) active[rank] = active[rank] != 0 && reached_[rank] != 0;
        return active;
    };
    const ActiveRanks before = limited(mask());
    RANK_OK(context_, layer_.combine(direction));
    context_.synchronize(layer_.stream());
    std::vector<Problem> others;
    for (const ActiveRanks& reached : between(before, limited(mask())))
        others.push_back(view_of(problem_, context_.rank(), counted_, reached));
    layer_.expect(others[0]);
    others.erase(others.begin());
    layer_.check_combine(direction, {}, others);
}

}  // namespace crossdock::testing
