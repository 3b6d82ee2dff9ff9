// SPDX-License-Identifier: Apache-2.0
#include "conformance/support/bad_call.h"

#include <algorithm>

namespace crossdock::testing {

void OpenTensor::set(ncclDataType_t type, const std::vector<size_t>& extents, void* data) {
    tensor = NCCL_EP_TENSOR_INIT;
    tensor.ndim = static_cast<unsigned>(extents.size());
    tensor.datatype = type;
    tensor.data = data;
    tensor.sizes = sizes;
    std::copy(extents.begin(), extents.end(), sizes);
}

Problem victim_problem(int num_ranks, ncclEpLayout_t layout) {
    Problem problem;
    problem.num_ranks = num_ranks;
    problem.num_experts = 2 * num_ranks;
    problem.max_tokens = 4;
    problem.num_topk = kVictimTopk;
    problem.hidden = problem.combine_hidden = kVictimHidden;
    problem.layout = layout;
    problem.ranks.resize(num_ranks);
    for (int rank = 0; rank < num_ranks; ++rank) {
        reference::RankInput& own = problem.ranks[rank];
        own.num_tokens = kVictimTokens;
        for (size_t token = 0; token < kVictimTokens; ++token) {
            own.ids.push_back(2 * rank);
            own.ids.push_back(2 * ((rank + 1) % num_ranks));
        }
        own.weights.assign(own.ids.size(), 0.5f);
    }
    return problem;
}

ncclEpGroupConfig_t good_group_config(RankContext& context, ncclEpAlgorithm_t algorithm) {
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    config.algorithm = algorithm;
    config.num_experts = 4 * static_cast<unsigned>(context.num_ranks());
    config.max_dispatch_tokens_per_rank = 4;
    if (algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT) config.max_recv_tokens_per_rank = 64;
    config.max_token_bytes = 512;
    config.timeout_ns = 60'000'000'000;
    return config;
}

void check_group_refusals(RankContext& context, ncclEpAlgorithm_t algorithm,
                          std::span<const Spoiled<GroupCall>> table) {
    const auto marker = reinterpret_cast<ncclEpGroup_t>(0x77);
    for (const Spoiled<GroupCall>& row : table) {
        GroupCall call{context.comm(), good_group_config(context, algorithm), nullptr};
        call.config_pointer = &call.config;
        row.spoil(call);
        ncclEpGroup_t group = marker;
        ncclEpGetVersion(nullptr);  // leaves another message
        const ncclResult_t result = ncclEpCreateGroup(&group, call.comm, call.config_pointer);
        const std::string message = crossdockGetLastError();
        RANK_CHECK(context, result == row.code, "{}: {}, \"{}\"", row.name, result_name(result), message);
        RANK_CHECK(context, message.find(row.word) != std::string::npos, "{}: \"{}\" does not say \"{}\"", row.name,
                   message, row.word);
        RANK_CHECK(context, group == marker || group == nullptr, "{}: a group was written", row.name);
        if (result == ncclSuccess) RANK_OK(context, ncclEpGroupDestroy(group));
    }
}

}  // namespace crossdock::testing
