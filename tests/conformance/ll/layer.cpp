// SPDX-License-Identifier: Apache-2.0
#include "conformance/ll/layer.h"

#include <algorithm>
#include <cstring>

#include "conformance/support/options.h"
#include "reference/formats.h"

namespace crossdock::testing {

using reference::Recipe;
using reference::type_bytes;

Layer::Layer(RankContext& context, ncclEpGroup_t group, const Problem& problem, const LayerOptions& options,
             cudaStream_t stream)
    : context_(context), group_(group), problem_(problem), options_(options), stream_(stream) {
    if (stream_ == nullptr) stream_ = context.make_stream();
    const size_t max_tokens = static_cast<size_t>(problem.max_tokens);
    const size_t rows = static_cast<size_t>(problem.num_blocks()) * static_cast<size_t>(problem.slots());
    const size_t topk = static_cast<size_t>(problem.num_topk);
    options_.in_place =
        options.in_place && problem.received_type() == problem.combine_type && problem.hidden == problem.combine_hidden;

    ids_ = make_buffer(max_tokens * topk * sizeof(int64_t));  // an update may bring another width
    tokens_ = make_buffer(max_tokens * problem.token_row_bytes());
    weights_ = make_buffer(max_tokens * topk * sizeof(float));
    received_ = make_buffer(rows * problem.received_row_bytes());
    if (problem.has_scales()) {
        const size_t shift = options_.odd_scales ? problem.scale_row_bytes() / problem.num_scales : 0;
        received_scales_ = make_buffer(rows * problem.scale_row_bytes(), shift);
        if (problem.recipe == Recipe::kForward) scales_ = make_buffer(max_tokens * problem.scale_row_bytes(), shift);
    }
    counters_ = make_buffer(static_cast<size_t>(problem.num_blocks()) * sizeof(int32_t));
    // An extent more than needed, which must stay as it is.
    offsets_ = make_buffer((static_cast<size_t>(problem.local_experts()) + 1) * sizeof(int64_t));
    total_ = make_buffer(2 * sizeof(int64_t));
    if (!problem.expert_major()) {
        received_weights_ = make_buffer(rows * topk * sizeof(float));
        received_ids_ = make_buffer(rows * topk * sizeof(int32_t));
    }
    if (!options_.in_place) combine_input_ = make_buffer(rows * problem.combine_row_bytes());
    if (problem.combine_recipe == NCCL_EP_COMB_QUANT_NVFP4) combine_scales_ = make_buffer(rows * sizeof(float));
    combine_output_ = make_buffer(max_tokens * problem.combine_row_bytes());

    write_inputs();
    const ncclResult_t made = make_handle();
    if (made == ncclRemoteError && options.peers_may_die) throw StopProgram("no handle without the dead");
    RANK_OK(context_, made);
    if (problem.expert_major() && problem.sums != CROSSDOCK_SUMS_EXACT) {
        RANK_OK(context_, crossdockHandleSetSums(handle_, problem.sums));
    }
}

Layer::~Layer() {
    const ncclResult_t result = ncclEpHandleDestroy(handle_);
    RANK_CHECK(context_, result == ncclSuccess, "ncclEpHandleDestroy answered {}: {}", result_name(result),
               crossdockGetLastError());
}

std::unique_ptr<Buffer> Layer::make_buffer(size_t bytes, size_t shift) {
    return std::make_unique<Buffer>(context_, stream_, bytes, options_.arena, shift);
}

ncclResult_t Layer::make_handle() {
    if (options_.create_in_one_call) {
        Tensor ids(problem_.index_type, {static_cast<size_t>(num_tokens()), static_cast<size_t>(problem_.num_topk)},
                   *ids_, options_.naming);
        return ncclEpCreateHandle(&handle_, group_, problem_.layout, ids, nullptr, nullptr, stream_);
    }
    Fleeting<ncclEpHandleConfig_t> config{NCCL_EP_HANDLE_CONFIG_INIT};
    ncclResult_t result = ncclSuccess;
    if (options_.own_handle_memory) {
        size_t bytes = 0;
        result = ncclEpHandleMemSize(group_, problem_.layout, config.get(), &bytes, problem_.num_topk);
        if (result != ncclSuccess) return result;
        handle_memory_ = std::make_unique<Buffer>(context_, stream_, bytes);
        Tensor memory(ncclUint8, {bytes}, *handle_memory_);
        result = ncclEpInitHandle(&handle_, group_, problem_.layout, config.get(), problem_.num_topk, memory);
    } else {
        result = ncclEpInitHandle(&handle_, group_, problem_.layout, options_.null_configs ? nullptr : config.get(),
                                  problem_.num_topk, nullptr);
    }
    return result == ncclSuccess ? update_handle() : result;
}

ncclResult_t Layer::update_handle() {
    Tensor ids(problem_.index_type, {static_cast<size_t>(num_tokens()), static_cast<size_t>(problem_.num_topk)}, *ids_,
               options_.naming);
    return ncclEpUpdateHandle(handle_, ids, nullptr, stream_);
}

void Layer::write_inputs() {
    const reference::RankInput& own = problem_.ranks[context_.rank()];
    std::vector<std::byte> ids(own.ids.size() * type_bytes(problem_.index_type));
    for (size_t i = 0; i < own.ids.size(); ++i) {
        const auto narrow = static_cast<int32_t>(own.ids[i]);
        if (problem_.index_type == ncclInt32) std::memcpy(&ids[i * sizeof narrow], &narrow, sizeof narrow);
        if (problem_.index_type == ncclInt64) std::memcpy(&ids[i * sizeof own.ids[i]], &own.ids[i], sizeof own.ids[i]);
    }
    ids_->poison();
    ids_->write(ids);
    weights_->poison();
    weights_->write(own.weights.data(), own.weights.size() * sizeof(float));
    std::vector<std::byte> tokens;
    std::vector<std::byte> scales;
    for (int token = 0; token < own.num_tokens; ++token) {
        const std::vector<std::byte> row = token_row(problem_, context_.rank(), token);
        tokens.insert(tokens.end(), row.begin(), row.end());
        if (!scales_) continue;
        const std::vector<std::byte> scale = scale_row(problem_, context_.rank(), token);
        scales.insert(scales.end(), scale.begin(), scale.end());
    }
    tokens_->poison();
    tokens_->write(tokens);
    if (scales_) scales_->write(scales);
}

void Layer::refill(const Problem& problem) {
    problem_ = problem;
    write_inputs();
}

void Layer::route(const Problem& problem) {
    refill(problem);
    RANK_OK(context_, update_handle());
}

ncclResult_t Layer::dispatch(bool send_only) {
    const size_t num_rows = static_cast<size_t>(num_tokens());
    const size_t topk = static_cast<size_t>(problem_.num_topk);
    const size_t blocks = static_cast<size_t>(problem_.num_blocks());
    const size_t slots = static_cast<size_t>(problem_.slots());
    const Naming naming = options_.naming;
    Tensor tokens(problem_.token_type, {num_rows, problem_.hidden}, *tokens_, naming);
    Tensor weights(ncclFloat32, {num_rows, topk}, *weights_, naming);
    Tensor received(problem_.received_type(), {blocks, slots, problem_.hidden}, *received_, naming);
    Tensor counters(ncclInt32, {blocks}, *counters_, naming);
    // An empty tensor has no address to give.
    if (num_rows == 0 && naming == Naming::kData) tokens->data = weights->data = nullptr;

    Fleeting<ncclEpDispatchInputs_t> inputs{NCCL_EP_DISPATCH_INPUTS_INIT};
    Fleeting<ncclEpDispatchOutputs_t> outputs{NCCL_EP_DISPATCH_OUTPUTS_INIT};
    Fleeting<ncclEpLayoutInfo_t> info{NCCL_EP_LAYOUT_INFO_INIT};
    Fleeting<ncclEpDispatchConfig_t> config{NCCL_EP_DISPATCH_CONFIG_INIT};
    inputs->tokens = tokens;
    outputs->tokens = received;
    std::unique_ptr<Tensor> scales, received_scales, received_weights, received_ids;
    if (scales_) {
        scales = std::make_unique<Tensor>(
            problem_.scale_type, std::initializer_list<size_t>{num_rows, problem_.num_scales}, *scales_, naming);
        if (num_rows == 0 && naming == Naming::kData) scales->get()->data = nullptr;
        inputs->scales = *scales;
    }
    if (received_scales_) {
        received_scales = std::make_unique<Tensor>(problem_.scale_type,
                                                   std::initializer_list<size_t>{blocks, slots, problem_.num_scales},
                                                   *received_scales_, naming);
        outputs->scales = *received_scales;
    }
    Tensor offsets(options_.place_type, {static_cast<size_t>(problem_.local_experts()) + 1}, *offsets_, naming);
    Tensor total(options_.place_type, {2}, *total_, naming);
    if (options_.ask_places) {
        info->expert_offsets = offsets;
        info->recv_total_counter = total;
    }
    if (problem_.expert_major()) {
        info->expert_counters = counters;
    } else {
        const std::initializer_list<size_t> shape{blocks, slots, topk};
        received_weights = std::make_unique<Tensor>(ncclFloat32, shape, *received_weights_, naming);
        received_ids = std::make_unique<Tensor>(ncclInt32, shape, *received_ids_, naming);
        inputs->topk_weights = weights;
        outputs->topk_weights = *received_weights;
        outputs->topk_idx = *received_ids;
        if (options_.source_counters) info->src_rank_counters = counters;
        info->recv_topk_idx_kind = problem_.id_kind;
    }
    config->send_only = send_only ? 1 : 0;
    config->round_scales = problem_.round_scales ? 1 : 0;
    if (problem_.recipe == Recipe::kForward) config->quant_recipe = NCCL_EP_DISP_QUANT_FWD;
    if (problem_.recipe == Recipe::kFp8) config->quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4;
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
    const size_t num_rows = static_cast<size_t>(num_tokens());
    const size_t blocks = static_cast<size_t>(problem_.num_blocks());
    const size_t slots = static_cast<size_t>(problem_.slots());
    const Naming naming = options_.naming;
    Tensor rows(problem_.combine_type, {blocks, slots, problem_.combine_hidden}, combine_input(), naming);
    Tensor result(problem_.combine_type, {num_rows, problem_.combine_hidden}, *combine_output_, naming);
    Tensor weights(ncclFloat32, {num_rows, static_cast<size_t>(problem_.num_topk)}, *weights_, naming);
    Fleeting<ncclEpCombineInputs_t> inputs{NCCL_EP_COMBINE_INPUTS_INIT};
    Fleeting<ncclEpCombineOutputs_t> outputs{NCCL_EP_COMBINE_OUTPUTS_INIT};
    Fleeting<ncclEpCombineConfig_t> config{NCCL_EP_COMBINE_CONFIG_INIT};
    inputs->tokens = rows;
    outputs->tokens = result;
    if (problem_.expert_major()) outputs->topk_weights = weights;
    std::unique_ptr<Tensor> scales;
    if (combine_scales_) {
        scales = std::make_unique<Tensor>(ncclFloat32, std::initializer_list<size_t>{blocks, slots, 1},
                                          *combine_scales_, naming);
        inputs->scales = *scales;
    }
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
