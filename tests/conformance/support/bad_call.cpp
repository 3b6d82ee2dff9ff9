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

}  // namespace crossdock::testing
