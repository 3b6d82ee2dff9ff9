// SPDX-License-Identifier: Apache-2.0
#include "conformance/ht/bad_call.h"

namespace crossdock::testing {
namespace {

constexpr size_t kTokens = 3;
constexpr size_t kTopk = 2;
constexpr size_t kHidden = 64;
constexpr size_t kBufferBytes = 1u << 18;

HtProblem victim_problem(int num_ranks, ncclEpLayout_t layout, bool is_eager) {
    HtProblem problem;
    problem.num_ranks = num_ranks;
    problem.num_experts = 2 * num_ranks;
    problem.max_tokens = 4;
    problem.num_topk = kTopk;
    problem.hidden = problem.combine_hidden = kHidden;
    problem.layout = layout;
    problem.alignment = layout == NCCL_EP_LAYOUT_EXPERT_MAJOR ? 4 : 1;
    problem.budget = is_eager ? 0 : problem.most_rows();
    problem.group_topk = kTopk;
    problem.ranks.resize(num_ranks);
    // Every token goes to the first expert of its own rank and of the next one, so that rows come to all ranks.
    for (int rank = 0; rank < num_ranks; ++rank) {
        reference::RankInput& own = problem.ranks[rank];
        own.num_tokens = kTokens;
        for (size_t token = 0; token < kTokens; ++token) {
            own.ids.push_back(2 * rank);
            own.ids.push_back(2 * ((rank + 1) % num_ranks));
        }
        own.weights.assign(own.ids.size(), 0.5f);
    }
    return problem;
}

ncclEpGroupConfig_t victim_config(RankContext& context, const HtProblem& problem) {
    ncclEpGroupConfig_t config = group_config_for(context, problem);
    config.max_token_bytes = 1280;
    return config;
}

}  // namespace

HtVictim::HtVictim(RankContext& context, ncclEpLayout_t layout, bool is_eager)
    : context_(context),
      group_(context, context.comm(), victim_config(context, victim_problem(context.num_ranks(), layout, is_eager))),
      layer_(context, group_.get(), victim_problem(context.num_ranks(), layout, is_eager)),
      stream_(context.make_stream()),
      input_(context, stream_, kBufferBytes),
      output_(context, stream_, kBufferBytes) {
    check_working();
}

void HtVictim::check_untouched(const std::string& after) {
    output_.check(std::vector<std::byte>(kBufferBytes, kPoison), 128,
                  "the outputs after a refused call, " + after + ",");
}

size_t HtVictim::rows() const {
    return problem().budget != 0 ? problem().budget : layer_.routing().received(context_.rank()).rows.size();
}

HtUpdateCall::HtUpdateCall(HtVictim& made_for) : victim(made_for), handle(made_for.handle()) {
    ids.set(ncclInt64, {kTokens, kTopk}, victim.input());
    counters.set(ncclInt32, {victim.local_experts()}, victim.output());
    offsets.set(ncclInt32, {victim.local_experts()}, victim.output());
    total.set(ncclInt32, {1}, victim.output());
    info.expert_counters = &counters.tensor;
    info.expert_offsets = &offsets.tensor;
    info.recv_total_counter = &total.tensor;
}

HtDispatchCall::HtDispatchCall(HtVictim& made_for) : DispatchArguments(made_for.handle()), victim(made_for) {
    const size_t rows = victim.rows();
    tokens.set(ncclBfloat16, {kTokens, kHidden}, victim.input());
    weights.set(ncclFloat32, {kTokens, kTopk}, victim.input());
    received.set(ncclBfloat16, {rows, kHidden}, victim.output());
    received_weights.set(ncclFloat32, {rows, kTopk}, victim.output());
    if (victim.problem().expert_major()) received_weights.set(ncclFloat32, {rows}, victim.output());
    received_ids.set(ncclInt64, {rows, kTopk}, victim.output());
    counters.set(ncclInt32, {victim.local_experts()}, victim.output());
    spare.set(ncclInt64, {rows, kTopk}, victim.output());
    inputs.tokens = &tokens.tensor;
    inputs.topk_weights = &weights.tensor;
    outputs.tokens = &received.tensor;
    outputs.topk_weights = &received_weights.tensor;
    if (!victim.problem().expert_major()) outputs.topk_idx = &received_ids.tensor;
}

void HtDispatchCall::forward_scales() {
    config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
    scales.set(ncclUint8, {kTokens, 128}, victim.input());
    received_scales.set(ncclUint8, {victim.rows(), 128}, victim.output());
    inputs.scales = &scales.tensor;
    outputs.scales = &received_scales.tensor;
}

void HtDispatchCall::go_backward() {
    config.pass_direction = NCCL_EP_BWD_PASS;
    inputs.topk_weights = nullptr;
    outputs.topk_weights = outputs.topk_idx = nullptr;
}

HtCombineCall::HtCombineCall(HtVictim& made_for) : CombineArguments(made_for.handle()), victim(made_for) {
    const size_t num_rows = victim.rows();
    rows.set(ncclBfloat16, {num_rows, kHidden}, victim.input());
    weights.set(ncclFloat32, {num_rows, kTopk}, victim.input());
    if (victim.problem().expert_major()) weights.set(ncclFloat32, {num_rows}, victim.input());
    scales.set(ncclFloat32, {num_rows, 1}, victim.input());
    combined.set(ncclBfloat16, {kTokens, kHidden}, victim.output());
    combined_weights.set(ncclFloat32, {kTokens, kTopk}, victim.output());
    inputs.tokens = &rows.tensor;
    outputs.tokens = &combined.tensor;
}

void HtCombineCall::go_backward() {
    config.pass_direction = NCCL_EP_BWD_PASS;
    inputs.topk_weights = &weights.tensor;
    outputs.topk_weights = &combined_weights.tensor;
}

}  // namespace crossdock::testing
