// SPDX-License-Identifier: Apache-2.0
#include "conformance/support/group.h"

#include <algorithm>

#include "conformance/support/options.h"

namespace crossdock::testing {

ncclEpGroupConfig_t group_config_for(RankContext& context, const std::vector<Problem>& problems) {
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    config.algorithm = problems[0].algorithm;
    config.num_experts = static_cast<unsigned>(problems[0].num_experts);
    // Long enough for a loaded machine; in the simulation it is simulated time.
    config.timeout_ns = context.is_simulated() ? 1'000'000'000 : 60'000'000'000;
    for (const Problem& problem : problems) {
        config.max_dispatch_tokens_per_rank =
            std::max(config.max_dispatch_tokens_per_rank, static_cast<unsigned>(problem.max_tokens));
        config.max_token_bytes = std::max(config.max_token_bytes, static_cast<unsigned>(problem.max_token_bytes()));
        // Version 1's FP8 is for callers who say that they are version 1's.
        if (problem.asks_as_v1) config.version = 1;
    }
    if (!problems[0].is_ht()) return config;
    config.max_recv_tokens_per_rank = static_cast<unsigned>(problems[0].budget);
    config.overflow_policy = problems[0].drops ? NCCL_EP_OVERFLOW_DROP : NCCL_EP_OVERFLOW_AUTO;
    config.num_topk = static_cast<unsigned>(problems[0].group_topk);
    return config;
}

ncclEpGroupConfig_t group_config_for(RankContext& context, const Problem& problem) {
    return group_config_for(context, std::vector{problem});
}

ncclResult_t create_group(RankContext& context, ncclEpGroup_t* group, ncclComm_t comm,
                          const ncclEpGroupConfig_t* config, bool invariant) {
    crossdockGroupOptions_t group_options = CROSSDOCK_GROUP_OPTIONS_INIT;
    group_options.lsa_team_size = lsa_team_for(context.num_ranks());
    group_options.invariant = invariant ? 1 : 0;
    if (group_options.lsa_team_size == 0 && !invariant) return ncclEpCreateGroup(group, comm, config);
    return crossdockCreateGroup(group, comm, config, &group_options);
}

crossdockTraffic_t traffic_of(RankContext& context, ncclEpGroup_t group) {
    crossdockTraffic_t traffic = CROSSDOCK_TRAFFIC_INIT;
    RANK_OK(context, crossdockGroupTraffic(group, &traffic));
    return traffic;
}

Group::Group(RankContext& context, ncclComm_t comm, const ncclEpGroupConfig_t& config, bool invariant)
    : context_(context) {
    Fleeting<ncclEpGroupConfig_t> copy(config);
    RANK_OK(context, create_group(context, &group_, comm, copy.get(), invariant));
}

Group::~Group() {
    const ncclResult_t result = ncclEpGroupDestroy(group_);
    RANK_CHECK(context_, result == ncclSuccess, "ncclEpGroupDestroy answered {}: {}", result_name(result),
               crossdockGetLastError());
}

}  // namespace crossdock::testing
