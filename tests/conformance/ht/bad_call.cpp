// SPDX-License-Identifier: Apache-2.0
#include "conformance/ht/bad_call.h"

namespace crossdock::testing {
namespace {

Problem ht_victim_problem(int num_ranks, ncclEpLayout_t layout, bool is_eager) {
    Problem problem = victim_problem(num_ranks, layout);
    set_mode(problem, kHighThroughput);
    if (is_eager) problem.budget = 0;
    problem.group_topk = kVictimTopk;
    return problem;
}

}  // namespace

HtVictim::HtVictim(RankContext& context, ncclEpLayout_t layout, bool is_eager)
    : VictimOf(context, ht_victim_problem(context.num_ranks(), layout, is_eager)) {}

size_t HtVictim::rows() const {
    return problem().budget != 0 ? problem().budget : layer_.routing().received(context_.rank()).rows.size();
}

HtUpdateCall::HtUpdateCall(HtVictim& made_for) : victim(made_for), handle(made_for.handle()) {
    ids.set(ncclInt64, {kVictimTokens, kVictimTopk}, victim.input());
    counters.set(ncclInt32, {victim.local_experts()}, victim.output());
    offsets.set(ncclInt32, {victim.local_experts()}, victim.output());
    total.set(ncclInt32, {1}, victim.output());
    info.expert_counters = &counters.tensor;
    info.expert_offsets = &offsets.tensor;
    info.recv_total_counter = &total.tensor;
}

HtDispatchCall::HtDispatchCall(HtVictim& made_for) : DispatchCallOf(made_for) {
    const bool expert_major = victim.problem().expert_major();
    counters.set(ncclInt32, {victim.local_experts()}, victim.output());
    if (expert_major) received_weights.set(ncclFloat32, {victim.rows()}, victim.output());
    inputs.topk_weights = &weights.tensor;
    outputs.topk_weights = &received_weights.tensor;
    if (!expert_major) outputs.topk_idx = &received_ids.tensor;
}

void HtDispatchCall::go_backward() {
    config.pass_direction = NCCL_EP_BWD_PASS;
    inputs.topk_weights = nullptr;
    outputs.topk_weights = outputs.topk_idx = nullptr;
}

HtCombineCall::HtCombineCall(HtVictim& made_for) : CombineCallOf(made_for) {
    weights.set(ncclFloat32, victim.extents_of_rows(kVictimTopk), victim.input());
    if (victim.problem().expert_major()) weights.set(ncclFloat32, {victim.rows()}, victim.input());
    combined_weights.set(ncclFloat32, {kVictimTokens, kVictimTopk}, victim.output());
}

void HtCombineCall::go_backward() {
    config.pass_direction = NCCL_EP_BWD_PASS;
    inputs.topk_weights = &weights.tensor;
    outputs.topk_weights = &combined_weights.tensor;
}

}  // namespace crossdock::testing
