// SPDX-License-Identifier: Apache-2.0
#include "conformance/ll/bad_call.h"

#include "conformance/ll/random_problem.h"

namespace crossdock::testing {
namespace {

constexpr size_t kTokens = 3;
constexpr size_t kTopk = 2;
constexpr size_t kHidden = 64;

Problem victim_problem(int num_ranks, ncclEpLayout_t layout) {
    Problem problem;
    problem.num_ranks = num_ranks;
    problem.num_experts = 2 * num_ranks;
    problem.max_tokens = 4;
    problem.num_topk = kTopk;
    problem.hidden = problem.combine_hidden = kHidden;
    problem.layout = layout;
    problem.ranks.resize(num_ranks);
    for (reference::RankInput& rank : problem.ranks) rank.num_tokens = kTokens;
    return rerouted(problem, 1, true);
}

ncclEpGroupConfig_t victim_config(RankContext& context, const Problem& problem, ncclEpZeroCopyMode_t zero_copy) {
    ncclEpGroupConfig_t config = group_config_for(context, problem);
    config.max_token_bytes = 1280;
    config.zero_copy = zero_copy;
    return config;
}

}  // namespace

void OpenTensor::set(ncclDataType_t type, std::initializer_list<size_t> extents, void* data) {
    tensor = NCCL_EP_TENSOR_INIT;
    tensor.ndim = static_cast<unsigned>(extents.size());
    tensor.datatype = type;
    tensor.data = data;
    tensor.sizes = sizes;
    std::copy(extents.begin(), extents.end(), sizes);
}

Victim::Victim(RankContext& context, ncclEpLayout_t layout, ncclEpZeroCopyMode_t zero_copy)
    : context_(context),
      group_(context, context.comm(), victim_config(context, victim_problem(context.num_ranks(), layout), zero_copy)),
      layer_(context, group_.get(), victim_problem(context.num_ranks(), layout)),
      stream_(context.make_stream()),
      input_(context, stream_, kBufferBytes),
      output_(context, stream_, kBufferBytes) {
    check_working();
}

void Victim::check_untouched(const std::string& after) {
    output_.check(std::vector<std::byte>(kBufferBytes, kPoison), 128,
                  "the outputs after a refused call, " + after + ",");
}

DispatchCall::DispatchCall(Victim& made_for) : DispatchArguments(made_for.handle()), victim(made_for) {
    const bool expert_major = victim.problem().expert_major();
    tokens.set(ncclBfloat16, {kTokens, kHidden}, victim.input());
    weights.set(ncclFloat32, {kTokens, kTopk}, victim.input());
    received.set(ncclBfloat16, {victim.blocks(), victim.slots(), kHidden}, victim.output());
    received_weights.set(ncclFloat32, {victim.blocks(), victim.slots(), kTopk}, victim.output());
    received_ids.set(ncclInt32, {victim.blocks(), victim.slots(), kTopk}, victim.output());
    counters.set(ncclInt32, {victim.blocks()}, victim.output());
    spare.set(ncclFloat32, {kTokens, kTopk}, victim.output());
    inputs.tokens = &tokens.tensor;
    outputs.tokens = &received.tensor;
    if (expert_major) {
        info.expert_counters = &counters.tensor;
        return;
    }
    info.src_rank_counters = &counters.tensor;
    inputs.topk_weights = &weights.tensor;
    outputs.topk_weights = &received_weights.tensor;
    outputs.topk_idx = &received_ids.tensor;
}

void DispatchCall::forward_scales() {
    config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
    scales.set(ncclUint8, {kTokens, 128}, victim.input());
    received_scales.set(ncclUint8, {victim.blocks(), victim.slots(), 128}, victim.output());
    inputs.scales = &scales.tensor;
    outputs.scales = &received_scales.tensor;
}

void DispatchCall::quantise() {
    config.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4;
    tokens.sizes[1] = received.sizes[2] = 512;
    received.tensor.datatype = ncclFloat8e4m3;
    received_scales.set(ncclFloat32, {victim.blocks(), victim.slots(), 4}, victim.output());
    outputs.scales = &received_scales.tensor;
}

CombineCall::CombineCall(Victim& made_for) : CombineArguments(made_for.handle()), victim(made_for) {
    rows.set(ncclBfloat16, {victim.blocks(), victim.slots(), kHidden}, victim.input());
    weights.set(ncclFloat32, {kTokens, kTopk}, victim.input());
    combined.set(ncclBfloat16, {kTokens, kHidden}, victim.output());
    inputs.tokens = &rows.tensor;
    outputs.tokens = &combined.tensor;
    if (victim.problem().expert_major()) outputs.topk_weights = &weights.tensor;
}

void CombineCall::quantise() {
    config.quant_recipe = NCCL_EP_COMB_QUANT_NVFP4;
    scales.set(ncclFloat32, {victim.blocks(), victim.slots(), 1}, victim.input());
    inputs.scales = &scales.tensor;
}

}  // namespace crossdock::testing
