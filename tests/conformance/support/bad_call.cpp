// SPDX-License-Identifier: Apache-2.0
#include "conformance/support/bad_call.h"

#include <algorithm>

namespace crossdock::testing {
namespace {

// Made before threads are.
const Bytes kPoisoned(Victim::kBufferBytes, kPoison);

Problem victim_problem(int num_ranks, ncclEpAlgorithm_t mode, ncclEpLayout_t layout, bool is_eager) {
    Problem problem;
    problem.num_ranks = num_ranks;
    problem.num_experts = 2 * num_ranks;
    problem.max_tokens = 4;
    problem.num_topk = kVictimTopk;
    problem.hidden = problem.combine_hidden = kVictimHidden;
    problem.layout = layout;
    set_mode(problem, mode);
    if (is_eager) problem.budget = 0;
    if (problem.is_ht()) problem.group_topk = kVictimTopk;
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

ncclEpGroupConfig_t victim_config(RankContext& context, const Problem& problem) {
    ncclEpGroupConfig_t config = group_config_for(context, problem);
    config.max_token_bytes = 1280;
    return config;
}

}  // namespace

void OpenTensor::set(ncclDataType_t type, const std::vector<size_t>& extents, void* data) {
    tensor = NCCL_EP_TENSOR_INIT;
    tensor.ndim = static_cast<unsigned>(extents.size());
    tensor.datatype = type;
    tensor.data = data;
    tensor.sizes = sizes;
    std::copy(extents.begin(), extents.end(), sizes);
}

Victim::Victim(RankContext& context, ncclEpAlgorithm_t mode, ncclEpLayout_t layout, bool is_eager)
    : Victim(context, victim_problem(context.num_ranks(), mode, layout, is_eager)) {}

Victim::Victim(RankContext& context, const Problem& problem)
    : context_(context),
      group_(context, context.comm(), victim_config(context, problem)),
      layer_(context, group_.get(), problem),
      input_(context, layer_.stream(), kBufferBytes),
      output_(context, layer_.stream(), kBufferBytes) {
    check_working();
}

void Victim::check_untouched(const std::string& after) {
    output_.check(kPoisoned, 128, "the outputs after a refused call, " + after + ",");
}

size_t Victim::num_rows() const {
    return problem().is_ht() && problem().budget == 0 ? layer_.routing().received(context_.rank()).rows.size()
                                                      : problem().budget;
}

UpdateCall::UpdateCall(Victim& made_for) : victim(made_for), handle(made_for.handle()) {
    ids.set(ncclInt64, {kVictimTokens, kVictimTopk}, victim.input());
    counters.set(ncclInt32, {victim.local_experts()}, victim.output());
    offsets.set(ncclInt32, {victim.local_experts()}, victim.output());
    total.set(ncclInt32, {1}, victim.output());
    info.expert_counters = &counters.tensor;
    info.expert_offsets = &offsets.tensor;
    info.recv_total_counter = &total.tensor;
}

DispatchCall::DispatchCall(Victim& made_for) : DispatchArguments(made_for.handle()), victim(made_for) {
    const Problem& problem = victim.problem();
    const bool of_sources = !problem.is_ht() && !problem.expert_major();
    tokens.set(ncclBfloat16, {kVictimTokens, kVictimHidden}, victim.input());
    weights.set(ncclFloat32, {kVictimTokens, kVictimTopk}, victim.input());
    received.set(ncclBfloat16, victim.extents_of_rows(kVictimHidden), victim.output());
    received_weights.set(ncclFloat32, victim.extents_of_weights(), victim.output());
    received_ids.set(id_type(problem), victim.extents_of_rows(kVictimTopk), victim.output());
    counters.set(ncclInt32, {of_sources ? received.sizes[0] : victim.local_experts()}, victim.output());
    inputs.tokens = &tokens.tensor;
    outputs.tokens = &received.tensor;
    if (!problem.is_ht()) (of_sources ? info.src_rank_counters : info.expert_counters) = &counters.tensor;
    if (!problem.is_ht() && problem.expert_major()) return;
    inputs.topk_weights = &weights.tensor;
    outputs.topk_weights = &received_weights.tensor;
    if (!problem.expert_major()) outputs.topk_idx = &received_ids.tensor;
}

void DispatchCall::forward_scales() {
    config.quant_recipe = NCCL_EP_DISP_QUANT_FWD;
    scales.set(ncclUint8, {kVictimTokens, kVictimScales}, victim.input());
    received_scales.set(ncclUint8, victim.extents_of_rows(kVictimScales), victim.output());
    inputs.scales = &scales.tensor;
    outputs.scales = &received_scales.tensor;
}

void DispatchCall::quantise() {
    const DispatchRecipe& recipe = victim.dispatch_recipe;
    config.quant_recipe = recipe.value;
    tokens.width() = received.width() = 512;
    tokens.tensor.datatype = recipe.token_type;
    received.tensor.datatype = recipe.received_type;
    received_scales.set(recipe.scale_type, victim.extents_of_rows(512 / recipe.scale_block), victim.output());
    outputs.scales = &received_scales.tensor;
}

void DispatchCall::go_backward() {
    config.pass_direction = NCCL_EP_BWD_PASS;
    inputs.topk_weights = nullptr;
    outputs.topk_weights = outputs.topk_idx = nullptr;
}

CombineCall::CombineCall(Victim& made_for) : CombineArguments(made_for.handle()), victim(made_for) {
    const Problem& problem = victim.problem();
    const std::vector<size_t> of_tokens{kVictimTokens, kVictimTopk};
    rows.set(ncclBfloat16, victim.extents_of_rows(kVictimHidden), victim.input());
    scales.set(ncclFloat32, victim.extents_of_rows(1), victim.input());
    combined.set(ncclBfloat16, {kVictimTokens, kVictimHidden}, victim.output());
    weights.set(ncclFloat32, problem.is_ht() ? victim.extents_of_weights() : of_tokens, victim.input());
    combined_weights.set(ncclFloat32, of_tokens, victim.output());
    inputs.tokens = &rows.tensor;
    outputs.tokens = &combined.tensor;
    if (!problem.is_ht() && problem.expert_major()) outputs.topk_weights = &weights.tensor;
}

void CombineCall::quantise() {
    config.quant_recipe = victim.combine_recipe.value;
    if (victim.combine_recipe.takes_row_scales) inputs.scales = &scales.tensor;
}

void CombineCall::go_backward() {
    config.pass_direction = NCCL_EP_BWD_PASS;
    inputs.topk_weights = &weights.tensor;
    outputs.topk_weights = &combined_weights.tensor;
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
