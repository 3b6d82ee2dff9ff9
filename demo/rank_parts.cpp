// SPDX-License-Identifier: Apache-2.0
#include "demo/rank_parts.h"

#include "crossdock/error.hpp"

namespace crossdock::demo {

crossdockGroupOptions_t group_options(const Options& options) {
    crossdockGroupOptions_t group = CROSSDOCK_GROUP_OPTIONS_INIT;
    // One node is whatever the communicator has.
    group.lsa_team_size = options.num_nodes > 1 ? options.num_ranks / options.num_nodes : 0;
    return group;
}

crossdockTraffic_t traffic_of(ncclEpGroup_t group) {
    crossdockTraffic_t traffic = CROSSDOCK_TRAFFIC_INIT;
    check(crossdockGroupTraffic(group, &traffic));
    return traffic;
}

std::unique_ptr<ExpertRunner> make_experts(const Options& options, int rank, tools::Device& device) {
    const int num_local = options.layer.num_experts / options.num_ranks;
    return options.backend == Backend::kCuda ? make_cuda_experts(options.layer, rank * num_local, num_local, device)
                                             : make_cpu_experts(options.layer, rank * num_local, num_local);
}

void route_share(const LayerShape& shape, const Router& router, const Text& text, Share share, RankTokens& tokens) {
    const auto hidden = static_cast<size_t>(shape.hidden);
    const auto topk = static_cast<size_t>(shape.topk);
    const size_t first = tokens.rows.size() / hidden;
    tokens.rows.resize((first + share.count) * hidden);
    tokens.experts.resize((first + share.count) * topk);
    tokens.weights.resize((first + share.count) * topk);
    for (size_t t = 0; t < share.count; ++t) {
        const size_t position = share.first + t;
        const int64_t previous = position > 0 ? static_cast<int64_t>(text.tokens[position - 1]) : -1;
        uint16_t* row = &tokens.rows[(first + t) * hidden];
        embed(shape, text.tokens[position], previous, row);
        router.route(row, &tokens.experts[(first + t) * topk], &tokens.weights[(first + t) * topk]);
    }
}

}  // namespace crossdock::demo
