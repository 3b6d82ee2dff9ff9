// SPDX-License-Identifier: Apache-2.0
#include "conformance/ht/layer.h"

#include <algorithm>

namespace crossdock::testing {

using reference::Recipe;

HtLayer::HtLayer(RankContext& context, ncclEpGroup_t group, const Problem& problem, const HtOptions& options,
                 cudaStream_t stream)
    : LayerBase(context, group, stream),
      lsa_team_size_(static_cast<int>(traffic_of(context, group).lsa_team_size)),
      problem_(problem),
      routing_(problem),
      options_(options) {
    unused_rows_matter_ = !options.keep_outputs;
    make_own_buffers();
    write_routing();
    RANK_OK(context_, make_handle());
}

HtLayer::Numbers HtLayer::make_numbers() {
    // An extent more than needed, which must stay as it is.
    WindowArena* const arena = arena_if(options_.other_windows);
    return {make_buffer((local_experts() + 1) * sizeof(int64_t), arena),
            make_buffer((local_experts() + 1) * sizeof(int64_t), arena), make_buffer(2 * sizeof(int64_t), arena)};
}

void HtLayer::make_own_buffers() {
    const size_t limit = problem_.budget != 0 ? problem_.budget : problem_.most_rows();
    const size_t rows = limit + options_.extra_rows;
    const size_t metadata_rows = limit + std::max(options_.extra_metadata_rows, options_.extra_rows);
    const size_t weights_of_row = problem_.expert_major() ? 1 : topk();
    WindowArena* const other = arena_if(options_.other_windows);
    make_buffers(rows, {arena_if(options_.output_windows), arena_if(options_.combine_windows), other},
                 options_.in_place, options_.odd_scales);
    update_numbers_ = make_numbers();
    dispatch_numbers_ = make_numbers();
    received_weights_ = make_buffer(metadata_rows * weights_of_row * sizeof(float), other);
    if (!problem_.expert_major()) received_ids_ = make_buffer(metadata_rows * topk() * sizeof(int64_t), other);
    gradients_ = make_buffer(rows * weights_of_row * sizeof(float), other);
    combined_gradients_ = make_buffer(static_cast<size_t>(problem_.max_tokens) * topk() * sizeof(float), other);
}

size_t HtLayer::num_rows() const {
    const bool exact = problem_.budget == 0 || options_.exact_rows;
    return (exact ? received().rows.size() : problem_.budget) + options_.extra_rows;
}

size_t HtLayer::num_metadata_rows() const {
    // Tensors agree on being empty.
    if (problem_.budget == 0 && received().rows.empty()) return num_rows();
    return (problem_.budget == 0 ? received().rows.size() : problem_.budget) + options_.extra_metadata_rows;
}

size_t HtLayer::num_combine_rows() const { return options_.exact_combine_rows ? received().rows.size() : num_rows(); }

ncclResult_t HtLayer::make_handle() {
    Fleeting<ncclEpHandleConfig_t> config{NCCL_EP_HANDLE_CONFIG_INIT};
    config->dispatch_output_per_expert_alignment = problem_.alignment;
    ncclEpHandleConfig_t* const given = options_.null_configs && problem_.alignment <= 1 ? nullptr : config.get();
    if (options_.create_in_one_call) {
        is_updated_ = true;
        Call call(options_.naming);
        Fleeting<ncclEpLayoutInfo_t> info(numbers_info(call, update_numbers_));
        return ncclEpCreateHandle(&handle_, group_, problem_.layout, ids_tensor(call), info.get(), given, stream_);
    }
    if (options_.own_handle_memory) handle_memory_ = make_handle_memory(context_, group_, problem_, stream_);
    const Buffer* const memory = handle_memory_ ? handle_memory_.get() : options_.handle_memory;
    Call call(options_.naming);
    ncclEpTensor_t* const tensor = call.tensor(ncclUint8, {memory != nullptr ? memory->bytes() : 0}, memory);
    const int num_topk = options_.open_topk ? -1 : problem_.num_topk;
    const ncclResult_t result = ncclEpInitHandle(&handle_, group_, problem_.layout, given, num_topk, tensor);
    return result == ncclSuccess && !options_.without_update ? update() : result;
}

HtOptions random_ht_options(uint64_t seed, WindowArena* arena) {
    Random random(seed ^ 0x5EED);
    HtOptions options;
    options.create_in_one_call = random.chance(30);
    options.own_handle_memory = !options.create_in_one_call && random.chance(40);
    options.in_place = random.chance(30);
    options.null_configs = random.chance(50);
    options.ask_counters = random.chance(70);
    options.ask_offsets = random.chance(70);
    options.ask_total = random.chance(70);
    options.counter_type = random.pick({ncclInt32, ncclInt64});
    options.dispatch_counters = random.chance(30);
    options.extra_rows = static_cast<size_t>(random.pick({0, 0, 0, 1, 7}));
    options.extra_metadata_rows = static_cast<size_t>(random.pick({0, 0, 0, 1, 7}));
    options.exact_combine_rows = random.chance(40);
    if (arena == nullptr) return options;
    options.arena = arena;
    options.naming = random.pick({Naming::kWindowOnly, Naming::kWindowAndData});
    options.output_windows = random.chance(70);
    options.combine_windows = random.chance(70);
    options.other_windows = random.chance(30);
    return options;
}

std::unique_ptr<Buffer> make_handle_memory(RankContext& context, ncclEpGroup_t group, const Problem& problem,
                                           cudaStream_t stream) {
    Fleeting<ncclEpHandleConfig_t> config{NCCL_EP_HANDLE_CONFIG_INIT};
    config->dispatch_output_per_expert_alignment = problem.alignment;
    size_t bytes = 0;
    RANK_OK(context, ncclEpHandleMemSize(group, problem.layout, config.get(), &bytes, problem.num_topk));
    return std::make_unique<Buffer>(context, stream, bytes);
}

ncclEpLayoutInfo_t HtLayer::numbers_info(Call& call, Numbers& numbers) {
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    const ncclDataType_t type = options_.counter_type;
    if (options_.ask_counters)
        info.expert_counters = call.tensor(type_of_counters(), {local_experts() + 1}, numbers.counters.get());
    if (options_.ask_offsets) info.expert_offsets = call.tensor(type, {local_experts() + 1}, numbers.offsets.get());
    if (options_.ask_total) info.recv_total_counter = call.tensor(type, {2}, numbers.total.get());
    return info;
}

ncclResult_t HtLayer::update() {
    is_updated_ = true;
    Call call(options_.naming);
    Fleeting<ncclEpLayoutInfo_t> info(numbers_info(call, update_numbers_));
    if (options_.version_1_structs) info->size = NCCL_EP_LAYOUT_INFO_V1_SIZE;
    const bool none = !options_.ask_counters && !options_.ask_offsets && !options_.ask_total;
    return ncclEpUpdateHandle(handle_, ids_tensor(call), none && options_.null_configs ? nullptr : info.get(), stream_);
}

void HtLayer::expect(const Problem& problem) {
    problem_ = problem;
    routing_.emplace(problem);
}

void HtLayer::refill(const Problem& problem) {
    expect(problem);
    write_routing();
}

void HtLayer::route(const Problem& problem) {
    refill(problem);
    prepare_update();
    RANK_OK(context_, update());
}

void HtLayer::change_data(uint64_t seed) { problem_.seed = seed; }

ncclResult_t HtLayer::dispatch(ncclEpPassDir_t direction) {
    const bool forward = direction == NCCL_EP_FWD_PASS;
    const bool flat = !problem_.expert_major();
    Call call(options_.naming);
    Fleeting<ncclEpDispatchInputs_t> inputs{NCCL_EP_DISPATCH_INPUTS_INIT};
    Fleeting<ncclEpDispatchOutputs_t> outputs{NCCL_EP_DISPATCH_OUTPUTS_INIT};
    Fleeting<ncclEpDispatchConfig_t> config{NCCL_EP_DISPATCH_CONFIG_INIT};
    inputs->tokens = call.tensor(problem_.token_type, {num_tokens(), problem_.hidden}, tokens_.get());
    outputs->tokens = call.tensor(problem_.received_type(), {num_rows(), problem_.hidden}, received_.get());
    inputs->scales = call.tensor(problem_.scale_type, {num_tokens(), problem_.num_scales}, scales_.get());
    outputs->scales = call.tensor(problem_.scale_type, {num_rows(), problem_.num_scales}, received_scales_.get());
    ncclEpLayoutInfo_t named = NCCL_EP_LAYOUT_INFO_INIT;
    if (forward) {
        const size_t rows = num_metadata_rows();
        inputs->topk_weights = call.tensor(ncclFloat32, {num_tokens(), topk()}, weights_.get());
        outputs->topk_weights = flat ? call.tensor(ncclFloat32, {rows, topk()}, received_weights_.get())
                                     : call.tensor(ncclFloat32, {rows}, received_weights_.get());
        outputs->topk_idx = call.tensor(ncclInt64, {rows, topk()}, received_ids_.get());
        named.recv_topk_idx_kind = problem_.id_kind;
    }
    if (options_.dispatch_counters) {
        const ncclEpExpertIdKind_t kind = named.recv_topk_idx_kind;
        named = numbers_info(call, dispatch_numbers_);
        named.recv_topk_idx_kind = kind;
    }
    Fleeting<ncclEpLayoutInfo_t> info(named);
    config->send_only = problem_.seed % 2;  // means nothing here
    config->pass_direction = direction;
    if (problem_.recipe == Recipe::kForward) config->quant_recipe = NCCL_EP_DISP_QUANT_FWD;
    const bool defaults = forward && !problem_.has_scales();
    if (options_.version_1_structs) {
        // The fields that version 1 did not have hold rubbish, which must not be looked at.
        config->size = NCCL_EP_DISPATCH_CONFIG_V1_SIZE;
        config->quant_recipe = static_cast<ncclEpDispQuant_t>(77);
        info->size = NCCL_EP_LAYOUT_INFO_V1_SIZE;
        info->recv_topk_idx_kind = static_cast<ncclEpExpertIdKind_t>(77);
    }
    const bool no_info = !options_.dispatch_counters && problem_.id_kind == NCCL_EP_EXPERT_ID_AUTO;
    return ncclEpDispatch(handle_, inputs.get(), outputs.get(), no_info && options_.null_configs ? nullptr : info.get(),
                          defaults && options_.null_configs ? nullptr : config.get(), stream_);
}

ncclResult_t HtLayer::combine(ncclEpPassDir_t direction) {
    const bool forward = direction == NCCL_EP_FWD_PASS;
    const size_t rows = num_combine_rows();
    Call call(options_.naming);
    Fleeting<ncclEpCombineInputs_t> inputs{NCCL_EP_COMBINE_INPUTS_INIT};
    Fleeting<ncclEpCombineOutputs_t> outputs{NCCL_EP_COMBINE_OUTPUTS_INIT};
    Fleeting<ncclEpCombineConfig_t> config{NCCL_EP_COMBINE_CONFIG_INIT};
    inputs->tokens = call.tensor(problem_.combine_type, {rows, problem_.combine_hidden}, &combine_input());
    outputs->tokens =
        call.tensor(problem_.combine_type, {num_tokens(), problem_.combine_hidden}, combine_output_.get());
    // Forward: ignored.
    if (!forward || problem_.seed % 2 == 0)
        outputs->topk_weights = call.tensor(ncclFloat32, {num_tokens(), topk()}, combined_gradients_.get());
    if (!forward) {
        inputs->topk_weights = problem_.expert_major() ? call.tensor(ncclFloat32, {rows}, gradients_.get())
                                                       : call.tensor(ncclFloat32, {rows, topk()}, gradients_.get());
    }
    config->send_only = problem_.seed % 2;
    config->pass_direction = direction;
    config->quant_recipe = problem_.combine_recipe;
    const bool defaults = forward && problem_.combine_recipe == NCCL_EP_COMB_QUANT_NONE;
    if (options_.version_1_structs) {
        config->size = NCCL_EP_COMBINE_CONFIG_V1_SIZE;
        config->quant_recipe = static_cast<ncclEpCombQuant_t>(77);
        inputs->size = NCCL_EP_COMBINE_INPUTS_V1_SIZE;
        inputs->scales = reinterpret_cast<ncclEpTensor_t*>(77);
    }
    return ncclEpCombine(handle_, inputs.get(), outputs.get(),
                         defaults && options_.null_configs ? nullptr : config.get(), stream_);
}

}  // namespace crossdock::testing
