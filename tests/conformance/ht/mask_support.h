// SPDX-License-Identifier: Apache-2.0
// High-throughput groups that go on without lost ranks: what a step must bring then.
#pragma once

#include "conformance/support/fault_support.h"
#include "conformance/support/layer.h"

namespace crossdock::testing {

// Every rank sends to every other. Ranks have different numbers of tokens, no two sets of ranks as many in all.
Problem mask_problem(int num_ranks, ncclEpLayout_t layout, uint64_t seed);

// A group with ht_masks; null where it was not made.
OwnedGroup try_mask_group(RankContext& context, const Problem& problem, uint64_t timeout_ns);
// The same; must be made.
OwnedGroup mask_group(RankContext& context, const Problem& problem, uint64_t timeout_ns);

// The operations of a training step.
constexpr int kMaskPhases = 5;

// A handle's owner that does not know who is there: what must come out of each operation is what the rank's own mask
// says behind it.
class DegradedLayer {
  public:
    DegradedLayer(RankContext& context, ncclEpGroup_t group, const Problem& problem, const LayerOptions& options = {});

    Layer& layer() { return layer_; }
    // Another routing from the next update on.
    void route(const Problem& problem) { problem_ = problem; }
    // Operation `phase` of a step, checked.
    void run(int phase);
    void step();
    // What the last update left out.
    void check_dropped();

  private:
    void update();
    void dispatch(ncclEpPassDir_t direction);
    void combine(ncclEpPassDir_t direction);
    ActiveRanks mask() const { return query_mask(context_, group_); }

    RankContext& context_;
    ncclEpGroup_t group_;
    Problem problem_;  // as if all were there
    Layer layer_;
    ActiveRanks counted_;  // whose rows the last update has counted
    ActiveRanks reached_;  // to whom it lets own rows go
};

ActiveRanks all_but(int num_ranks, std::initializer_list<int> ranks);

}  // namespace crossdock::testing
