// SPDX-License-Identifier: Apache-2.0
// Groups of either mode, made as a problem needs them.
#pragma once

#include "conformance/support/tensors.h"
#include "reference/problem.h"

namespace crossdock::testing {

using reference::Problem;

// A group configuration that suits all of these problems, of one mode. In high throughput their budgets and num_topk
// are the same.
ncclEpGroupConfig_t group_config_for(RankContext& context, const std::vector<Problem>& problems);
ncclEpGroupConfig_t group_config_for(RankContext& context, const Problem& problem);

// ncclEpCreateGroup, in LSA teams as --lsa-team says.
ncclResult_t create_group(RankContext& context, ncclEpGroup_t* group, ncclComm_t comm,
                          const ncclEpGroupConfig_t* config, bool invariant = false);

// What the group says of its teams and of what it has sent.
crossdockTraffic_t traffic_of(RankContext& context, ncclEpGroup_t group);

class Group {
  public:
    // Stops the program if the group cannot be made.
    Group(RankContext& context, ncclComm_t comm, const ncclEpGroupConfig_t& config, bool invariant = false);
    Group(RankContext& context, const Problem& problem)
        : Group(context, context.comm(), group_config_for(context, problem), problem.invariant) {}
    Group(RankContext& context, const std::vector<Problem>& problems)
        : Group(context, context.comm(), group_config_for(context, problems)) {}
    ~Group();
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;
    ncclEpGroup_t get() const { return group_; }

  private:
    RankContext& context_;
    ncclEpGroup_t group_ = nullptr;
};

}  // namespace crossdock::testing
