// SPDX-License-Identifier: Apache-2.0
#include "conformance/ll/layer.h"

#include "reference/recipes.h"

namespace crossdock::testing {

using reference::Recipe;

Layer::Layer(RankContext& context, ncclEpGroup_t group, const Problem& problem, const LayerOptions& options,
             cudaStream_t stream)
    : LayerBase(context, group, stream), problem_(problem), options_(options) {
    WindowArena* const arena = options.arena;
    const size_t rows = static_cast<size_t>(problem.num_blocks()) * static_cast<size_t>(problem.slots());
    make_buffers(rows, {arena, arena, arena}, options.in_place, options.odd_scales);
    counters_ = make_buffer(static_cast<size_t>(problem.num_blocks()) * sizeof(int32_t), arena);
    // An extent more than needed, which must stay as it is.
    offsets_ = make_buffer((local_experts() + 1) * sizeof(int64_t), arena);
    total_ = make_buffer(2 * sizeof(int64_t), arena);
    if (!problem.expert_major()) {
        received_weights_ = make_buffer(rows * topk() * sizeof(float), arena);
        received_ids_ = make_buffer(rows * topk() * sizeof(int32_t), arena);
    }
    if (reference::takes_row_scales(problem.combine_recipe)) combine_scales_ = make_buffer(rows * sizeof(float), arena);

    write_routing();
    write_inputs();
    const ncclResult_t made = make_handle();
    if (made == ncclRemoteError && options.peers_may_die) throw StopProgram("no handle without the dead");
    RANK_OK(context_, made);
    if (problem.expert_major() && problem.sums != CROSSDOCK_SUMS_EXACT) {
        RANK_OK(context_, crossdockHandleSetSums(handle_, problem.sums));
    }
}

ncclResult_t Layer::make_handle() {
    Call call(options_.naming);
    if (options_.create_in_one_call) {
        return ncclEpCreateHandle(&handle_, group_, problem_.layout, ids_tensor(call), nullptr, nullptr, stream_);
    }
    Fleeting<ncclEpHandleConfig_t> config{NCCL_EP_HANDLE_CONFIG_INIT};
    ncclEpTensor_t* memory = nullptr;
    if (options_.own_handle_memory) {
        size_t bytes = 0;
        const ncclResult_t result =
            ncclEpHandleMemSize(group_, problem_.layout, config.get(), &bytes, problem_.num_topk);
        if (result != ncclSuccess) return result;
        handle_memory_ = make_buffer(bytes, nullptr);
        memory = call.tensor(ncclUint8, {bytes}, handle_memory_.get());
    }
    const ncclResult_t result = ncclEpInitHandle(
        &handle_, group_, problem_.layout, options_.null_configs ? nullptr : config.get(), problem_.num_topk, memory);
    return result == ncclSuccess ? update_handle() : result;
}

ncclResult_t Layer::update_handle() {
    Call call(options_.naming);
    return ncclEpUpdateHandle(handle_, ids_tensor(call), nullptr, stream_);
}

void Layer::refill(const Problem& problem) {
    problem_ = problem;
    write_routing();
    write_inputs();
}

void Layer::route(const Problem& problem) {
    refill(problem);
    RANK_OK(context_, update_handle());
}

ncclResult_t Layer::dispatch(bool send_only) {
    const size_t blocks = static_cast<size_t>(problem_.num_blocks());
    const size_t slots = static_cast<size_t>(problem_.slots());
    Call call(options_.naming);
    Fleeting<ncclEpDispatchInputs_t> inputs{NCCL_EP_DISPATCH_INPUTS_INIT};
    Fleeting<ncclEpDispatchOutputs_t> outputs{NCCL_EP_DISPATCH_OUTPUTS_INIT};
    Fleeting<ncclEpLayoutInfo_t> info{NCCL_EP_LAYOUT_INFO_INIT};
    Fleeting<ncclEpDispatchConfig_t> config{NCCL_EP_DISPATCH_CONFIG_INIT};
    inputs->tokens = call.tensor(problem_.token_type, {num_tokens(), problem_.hidden}, tokens_.get());
    outputs->tokens = call.tensor(problem_.received_type(), {blocks, slots, problem_.hidden}, received_.get());
    inputs->scales = call.tensor(problem_.scale_type, {num_tokens(), problem_.num_scales}, scales_.get());
    outputs->scales = call.tensor(problem_.scale_type, {blocks, slots, problem_.num_scales}, received_scales_.get());
    if (options_.ask_places) {
        info->expert_offsets = call.tensor(options_.place_type, {local_experts() + 1}, offsets_.get());
        info->recv_total_counter = call.tensor(options_.place_type, {2}, total_.get());
    }
    ncclEpTensor_t* const counters = call.tensor(ncclInt32, {blocks}, counters_.get());
    if (problem_.expert_major()) {
        info->expert_counters = counters;
    } else {
        inputs->topk_weights = call.tensor(ncclFloat32, {num_tokens(), topk()}, weights_.get());
        outputs->topk_weights = call.tensor(ncclFloat32, {blocks, slots, topk()}, received_weights_.get());
        outputs->topk_idx = call.tensor(ncclInt32, {blocks, slots, topk()}, received_ids_.get());
        if (options_.source_counters) info->src_rank_counters = counters;
        info->recv_topk_idx_kind = problem_.id_kind;
    }
    config->send_only = send_only ? 1 : 0;
    config->round_scales = problem_.round_scales ? 1 : 0;
    config->quant_recipe = reference::quant_recipe(problem_.recipe);
    const bool defaults = !send_only && !problem_.round_scales && config->quant_recipe == NCCL_EP_DISP_QUANT_NONE;
    const unsigned cut = options_.cut_structs ? 3 : 0;
    if (options_.version_1_structs || options_.cut_structs || problem_.recipe == Recipe::kV1Fp8) {
        // The fields that version 1 did not have hold rubbish, which must not be looked at.
        config->size = NCCL_EP_DISPATCH_CONFIG_V1_SIZE + cut;
        config->quant_recipe = static_cast<ncclEpDispQuant_t>(77);
        info->size = NCCL_EP_LAYOUT_INFO_V1_SIZE + cut;
        info->recv_topk_idx_kind = static_cast<ncclEpExpertIdKind_t>(77);
    }
    const bool no_info = !problem_.expert_major() && !options_.source_counters && !options_.ask_places &&
                         problem_.id_kind == NCCL_EP_EXPERT_ID_AUTO;
    return ncclEpDispatch(handle_, inputs.get(), outputs.get(), no_info ? nullptr : info.get(),
                          defaults && options_.null_configs ? nullptr : config.get(), stream_);
}

ncclResult_t Layer::combine(bool send_only) {
    const size_t blocks = static_cast<size_t>(problem_.num_blocks());
    const size_t slots = static_cast<size_t>(problem_.slots());
    Call call(options_.naming);
    Fleeting<ncclEpCombineInputs_t> inputs{NCCL_EP_COMBINE_INPUTS_INIT};
    Fleeting<ncclEpCombineOutputs_t> outputs{NCCL_EP_COMBINE_OUTPUTS_INIT};
    Fleeting<ncclEpCombineConfig_t> config{NCCL_EP_COMBINE_CONFIG_INIT};
    inputs->tokens = call.tensor(problem_.combine_type, {blocks, slots, problem_.combine_hidden}, &combine_input());
    inputs->scales = call.tensor(ncclFloat32, {blocks, slots, 1}, combine_scales_.get());
    outputs->tokens =
        call.tensor(problem_.combine_type, {num_tokens(), problem_.combine_hidden}, combine_output_.get());
    if (problem_.expert_major())
        outputs->topk_weights = call.tensor(ncclFloat32, {num_tokens(), topk()}, weights_.get());
    config->send_only = send_only ? 1 : 0;
    config->quant_recipe = problem_.combine_recipe;
    const bool as_they_are = problem_.combine_recipe == NCCL_EP_COMB_QUANT_NONE;
    const bool defaults = !send_only && as_they_are;
    if ((options_.version_1_structs || options_.cut_structs) && as_they_are) {
        config->size = NCCL_EP_COMBINE_CONFIG_V1_SIZE + (options_.cut_structs ? 3 : 0);
        config->quant_recipe = static_cast<ncclEpCombQuant_t>(77);
        inputs->size = NCCL_EP_COMBINE_INPUTS_V1_SIZE + (options_.cut_structs ? 7 : 0);
        inputs->scales = reinterpret_cast<ncclEpTensor_t*>(77);
    }
    return ncclEpCombine(handle_, inputs.get(), outputs.get(),
                         defaults && options_.null_configs ? nullptr : config.get(), stream_);
}

ncclResult_t Layer::complete() {
    Fleeting<ncclEpCompleteConfig_t> config{NCCL_EP_COMPLETE_CONFIG_INIT};
    return ncclEpComplete(handle_, options_.null_configs ? nullptr : config.get(), stream_);
}

}  // namespace crossdock::testing
