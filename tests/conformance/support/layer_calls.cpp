// SPDX-License-Identifier: Apache-2.0
// The calls of a layer.
#include "conformance/support/layer.h"

namespace crossdock::testing {
namespace {

// The fields that version 1 did not have hold rubbish, which must not be looked at.
template <typename Enum>
constexpr Enum kRubbish = static_cast<Enum>(77);

}  // namespace

size_t Layer::num_rows() const {
    if (!problem_.is_ht()) return static_cast<size_t>(problem_.num_blocks() * problem_.slots());
    const bool exact = problem_.budget == 0 || options_.exact_rows;
    return (exact ? received().rows.size() : problem_.budget) + options_.extra_rows;
}

size_t Layer::num_metadata_rows() const {
    // Tensors agree on being empty.
    if (!problem_.is_ht() || (problem_.budget == 0 && received().rows.empty())) return num_rows();
    return (problem_.budget == 0 ? received().rows.size() : problem_.budget) + options_.extra_metadata_rows;
}

size_t Layer::num_combine_rows() const { return options_.exact_combine_rows ? received().rows.size() : num_rows(); }

size_t Layer::num_counters() const {
    return problem_.is_ht() ? local_experts() + 1 : static_cast<size_t>(problem_.num_blocks());
}

ncclDataType_t Layer::type_of_counters() const {
    return problem_.is_ht() && problem_.expert_major() ? options_.counter_type : ncclInt32;
}

ncclEpTensor_t* Layer::ids_tensor(Call& call) const {
    return call.tensor(problem_.index_type, {num_tokens(), topk()}, ids_.get());
}

ncclEpLayoutInfo_t Layer::numbers_info(Call& call, const Numbers& numbers) {
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    const bool of_sources = !problem_.is_ht() && !problem_.expert_major();
    if (asks_counters()) {
        (of_sources ? info.src_rank_counters : info.expert_counters) =
            call.tensor(type_of_counters(), {num_counters()}, numbers.counters.get());
    }
    if (asks(options_.ask_offsets))
        info.expert_offsets = call.tensor(options_.counter_type, {local_experts() + 1}, numbers.offsets.get());
    if (asks(options_.ask_total))
        info.recv_total_counter = call.tensor(options_.counter_type, {2}, numbers.total.get());
    return info;
}

ncclResult_t Layer::update() {
    is_updated_ = true;
    limit_sms(true);
    Call call(options_.naming);
    Fleeting<ncclEpLayoutInfo_t> info(numbers_info(call, update_numbers_));
    if (options_.version_1_structs) info->size = NCCL_EP_LAYOUT_INFO_V1_SIZE;
    const bool none = !options_.ask_counters && !asks(options_.ask_offsets) && !asks(options_.ask_total);
    const bool no_info = !problem_.is_ht() || (none && options_.null_configs);
    return ncclEpUpdateHandle(handle(), ids_tensor(call), no_info ? nullptr : info.get(), stream_);
}

// Dispatches and combines to the same number on every rank, updates to any.
void Layer::limit_sms(bool is_update) {
    if (options_.sms_seed == 0) return;
    const unsigned any = static_cast<unsigned>(context_.rank()) + 1;
    const unsigned number = sms_.pick({0u, 1u, 2u, 3u, 24u, 64u, 1000u});
    RANK_OK(context_, crossdockHandleSetSms(handle(), is_update ? any : number));
}

ncclResult_t Layer::dispatch(ncclEpPassDir_t direction, bool send_only) {
    limit_sms(false);
    const bool forward = direction == NCCL_EP_FWD_PASS;
    const size_t rows = num_rows();
    const size_t metadata_rows = num_metadata_rows();
    Call call(options_.naming);
    Fleeting<ncclEpDispatchInputs_t> inputs{NCCL_EP_DISPATCH_INPUTS_INIT};
    Fleeting<ncclEpDispatchOutputs_t> outputs{NCCL_EP_DISPATCH_OUTPUTS_INIT};
    Fleeting<ncclEpDispatchConfig_t> config{NCCL_EP_DISPATCH_CONFIG_INIT};
    const bool asks_numbers = !problem_.is_ht() || options_.dispatch_counters;
    Fleeting<ncclEpLayoutInfo_t> info(asks_numbers ? numbers_info(call, dispatch_numbers_) : NCCL_EP_LAYOUT_INFO_INIT);
    inputs->tokens = call.tensor(problem_.token_type, {num_tokens(), problem_.hidden}, tokens_.get());
    outputs->tokens =
        call.tensor(problem_.received_type(), row_extents(problem_, rows, problem_.hidden), received_.get());
    inputs->scales = call.tensor(problem_.scale_type, {num_tokens(), problem_.num_scales}, scales_.get());
    outputs->scales =
        call.tensor(problem_.scale_type, row_extents(problem_, rows, problem_.num_scales), received_scales_.get());
    if (forward && received_weights_) {
        inputs->topk_weights = call.tensor(ncclFloat32, {num_tokens(), topk()}, weights_.get());
        outputs->topk_weights =
            call.tensor(ncclFloat32, weight_extents(problem_, metadata_rows), received_weights_.get());
        outputs->topk_idx =
            call.tensor(id_type(problem_), row_extents(problem_, metadata_rows, topk()), received_ids_.get());
        info->recv_topk_idx_kind = problem_.id_kind;
    }
    config->send_only = problem_.is_ht() ? problem_.seed % 2 : send_only;  // means nothing in high throughput
    config->round_scales = problem_.round_scales ? 1 : 0;
    config->pass_direction = direction;
    config->quant_recipe = problem_.asks_as_v1 ? NCCL_EP_DISP_QUANT_NONE : problem_.recipe;
    const bool defaults =
        forward && !send_only && !problem_.round_scales && config->quant_recipe == NCCL_EP_DISP_QUANT_NONE;
    const bool asks_nothing = info->expert_counters == nullptr && info->src_rank_counters == nullptr &&
                              info->expert_offsets == nullptr && info->recv_total_counter == nullptr &&
                              info->recv_topk_idx_kind == NCCL_EP_EXPERT_ID_AUTO;
    if (options_.version_1_structs || options_.cut_structs || problem_.asks_as_v1) {
        const unsigned cut = options_.cut_structs ? 3 : 0;
        config->size = NCCL_EP_DISPATCH_CONFIG_V1_SIZE + cut;
        config->quant_recipe = kRubbish<ncclEpDispQuant_t>;
        info->size = NCCL_EP_LAYOUT_INFO_V1_SIZE + cut;
        info->recv_topk_idx_kind = kRubbish<ncclEpExpertIdKind_t>;
    }
    return ncclEpDispatch(handle(), inputs.get(), outputs.get(),
                          asks_nothing && options_.null_configs ? nullptr : info.get(),
                          defaults && options_.null_configs ? nullptr : config.get(), stream_);
}

ncclResult_t Layer::combine(ncclEpPassDir_t direction, bool send_only) {
    limit_sms(false);
    const bool forward = direction == NCCL_EP_FWD_PASS;
    const size_t rows = num_combine_rows();
    Call call(options_.naming);
    Fleeting<ncclEpCombineInputs_t> inputs{NCCL_EP_COMBINE_INPUTS_INIT};
    Fleeting<ncclEpCombineOutputs_t> outputs{NCCL_EP_COMBINE_OUTPUTS_INIT};
    Fleeting<ncclEpCombineConfig_t> config{NCCL_EP_COMBINE_CONFIG_INIT};
    inputs->tokens =
        call.tensor(problem_.combine_type, row_extents(problem_, rows, problem_.combine_hidden), &combine_input());
    inputs->scales = call.tensor(ncclFloat32, row_extents(problem_, rows, 1), combine_scales_.get());
    if (!forward) inputs->topk_weights = call.tensor(ncclFloat32, weight_extents(problem_, rows), gradients_.get());
    outputs->tokens =
        call.tensor(problem_.combine_type, {num_tokens(), problem_.combine_hidden}, combine_output_.get());
    // In high throughput gradients come backward, and forward the tensor is ignored; a low-latency combine in the
    // expert-major layout reads the weights there.
    const bool has_weights = problem_.is_ht() ? !forward || problem_.seed % 2 == 0 : problem_.expert_major();
    const Buffer* const weights = problem_.is_ht() ? combined_gradients_.get() : weights_.get();
    if (has_weights) outputs->topk_weights = call.tensor(ncclFloat32, {num_tokens(), topk()}, weights);
    config->send_only = problem_.is_ht() ? problem_.seed % 2 : send_only;
    config->pass_direction = direction;
    config->quant_recipe = problem_.combine_recipe;
    const bool as_they_are = problem_.combine_recipe == NCCL_EP_COMB_QUANT_NONE;
    const bool defaults = forward && !send_only && as_they_are;
    if ((options_.version_1_structs || options_.cut_structs) && as_they_are) {
        config->size = NCCL_EP_COMBINE_CONFIG_V1_SIZE + (options_.cut_structs ? 3 : 0);
        config->quant_recipe = kRubbish<ncclEpCombQuant_t>;
        inputs->size = NCCL_EP_COMBINE_INPUTS_V1_SIZE + (options_.cut_structs ? 7 : 0);
        inputs->scales = reinterpret_cast<ncclEpTensor_t*>(77);
    }
    return ncclEpCombine(handle(), inputs.get(), outputs.get(),
                         defaults && options_.null_configs ? nullptr : config.get(), stream_);
}

ncclResult_t Layer::complete() {
    Fleeting<ncclEpCompleteConfig_t> config{NCCL_EP_COMPLETE_CONFIG_INIT};
    return ncclEpComplete(handle(), options_.null_configs ? nullptr : config.get(), stream_);
}

}  // namespace crossdock::testing
