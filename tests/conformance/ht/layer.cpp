// SPDX-License-Identifier: Apache-2.0
#include "conformance/ht/layer.h"

#include <algorithm>
#include <cstring>
#include <deque>

#include "reference/formats.h"

namespace crossdock::testing {

using reference::Recipe;
using reference::type_bytes;

// The tensors of one call; they go with it.
class HtLayer::Call {
  public:
    explicit Call(const HtLayer& layer) : naming_(layer.options_.naming) {}
    ncclEpTensor_t* tensor(ncclDataType_t type, std::initializer_list<size_t> sizes, const Buffer* buffer) {
        if (buffer == nullptr) return nullptr;
        const Naming naming = buffer->arena() != nullptr ? naming_ : Naming::kData;
        Tensor& made = tensors_.emplace_back(type, sizes, *buffer, naming);
        // An empty tensor has no address to give.
        if (naming == Naming::kData && *sizes.begin() == 0) made->data = nullptr;
        return made;
    }

  private:
    Naming naming_;
    std::deque<Tensor> tensors_;
};

HtLayer::HtLayer(RankContext& context, ncclEpGroup_t group, const HtProblem& problem, const HtOptions& options,
                 cudaStream_t stream)
    : context_(context),
      group_(group),
      domain_ranks_(static_cast<int>(traffic_of(context, group).domain_ranks)),
      problem_(problem),
      routing_(problem),
      options_(options),
      stream_(stream) {
    if (stream_ == nullptr) stream_ = context.make_stream();
    options_.in_place =
        options.in_place && problem.received_type() == problem.combine_type && problem.hidden == problem.combine_hidden;
    make_buffers();
    write_routing();
    RANK_OK(context_, make_handle());
}

HtLayer::~HtLayer() {
    const ncclResult_t result = ncclEpHandleDestroy(handle_);
    RANK_CHECK(context_, result == ncclSuccess, "ncclEpHandleDestroy answered {}: {}", result_name(result),
               crossdockGetLastError());
}

std::unique_ptr<Buffer> HtLayer::make_buffer(size_t bytes, bool in_window, size_t shift) {
    return std::make_unique<Buffer>(context_, stream_, bytes, in_window ? options_.arena : nullptr, shift);
}

HtLayer::Numbers HtLayer::make_numbers() {
    // An extent more than needed, which must stay as it is.
    const bool window = options_.other_windows;
    return {make_buffer((local_experts() + 1) * sizeof(int64_t), window),
            make_buffer((local_experts() + 1) * sizeof(int64_t), window), make_buffer(2 * sizeof(int64_t), window)};
}

void HtLayer::make_buffers() {
    const size_t max_tokens = static_cast<size_t>(problem_.max_tokens);
    const size_t limit = problem_.budget != 0 ? problem_.budget : problem_.most_rows();
    const size_t rows = limit + options_.extra_rows;
    const size_t metadata_rows = limit + std::max(options_.extra_metadata_rows, options_.extra_rows);
    const size_t most_weights = metadata_rows * (problem_.expert_major() ? 1 : topk());
    const bool other = options_.other_windows;
    ids_ = make_buffer(max_tokens * topk() * sizeof(int64_t), other);  // an update may bring another width
    update_numbers_ = make_numbers();
    dispatch_numbers_ = make_numbers();
    tokens_ = make_buffer(max_tokens * problem_.token_row_bytes(), other);
    weights_ = make_buffer(max_tokens * topk() * sizeof(float), other);
    received_ = make_buffer(rows * problem_.received_row_bytes(), options_.output_windows);
    if (problem_.has_scales()) {
        const size_t shift = options_.odd_scales ? problem_.scale_row_bytes() / problem_.num_scales : 0;
        scales_ = make_buffer(max_tokens * problem_.scale_row_bytes(), other, shift);
        received_scales_ = make_buffer(rows * problem_.scale_row_bytes(), options_.output_windows, shift);
    }
    received_weights_ = make_buffer(most_weights * sizeof(float), other);
    if (!problem_.expert_major()) received_ids_ = make_buffer(metadata_rows * topk() * sizeof(int64_t), other);
    if (!options_.in_place) combine_input_ = make_buffer(rows * problem_.combine_row_bytes(), options_.combine_windows);
    gradients_ = make_buffer(rows * (problem_.expert_major() ? 1 : topk()) * sizeof(float), other);
    combine_output_ = make_buffer(max_tokens * problem_.combine_row_bytes(), other);
    combined_gradients_ = make_buffer(max_tokens * topk() * sizeof(float), other);
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
        Call call(*this);
        Fleeting<ncclEpLayoutInfo_t> info(numbers_info(call, update_numbers_));
        ncclEpTensor_t* ids = call.tensor(problem_.index_type, {num_tokens(), topk()}, ids_.get());
        return ncclEpCreateHandle(&handle_, group_, problem_.layout, ids, info.get(), given, stream_);
    }
    if (options_.own_handle_memory) handle_memory_ = make_handle_memory(context_, group_, problem_, stream_);
    const Buffer* const memory = handle_memory_ ? handle_memory_.get() : options_.handle_memory;
    std::optional<Tensor> tensor;
    if (memory != nullptr) tensor.emplace(ncclUint8, std::initializer_list<size_t>{memory->bytes()}, *memory);
    const int num_topk = options_.open_topk ? -1 : problem_.num_topk;
    const ncclResult_t result =
        ncclEpInitHandle(&handle_, group_, problem_.layout, given, num_topk, tensor ? tensor->get() : nullptr);
    return result == ncclSuccess && !options_.without_update ? update() : result;
}

std::unique_ptr<Buffer> make_handle_memory(RankContext& context, ncclEpGroup_t group, const HtProblem& problem,
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
    Call call(*this);
    Fleeting<ncclEpLayoutInfo_t> info(numbers_info(call, update_numbers_));
    if (options_.version_1_structs) info->size = NCCL_EP_LAYOUT_INFO_V1_SIZE;
    const bool none = !options_.ask_counters && !options_.ask_offsets && !options_.ask_total;
    ncclEpTensor_t* ids = call.tensor(problem_.index_type, {num_tokens(), topk()}, ids_.get());
    return ncclEpUpdateHandle(handle_, ids, none && options_.null_configs ? nullptr : info.get(), stream_);
}

void HtLayer::write_routing() {
    const reference::RankInput& own = problem_.ranks[context_.rank()];
    std::vector<std::byte> ids(own.ids.size() * type_bytes(problem_.index_type));
    for (size_t i = 0; i < own.ids.size(); ++i) {
        const auto narrow = static_cast<int32_t>(own.ids[i]);
        if (problem_.index_type == ncclInt32) std::memcpy(&ids[i * sizeof narrow], &narrow, sizeof narrow);
        if (problem_.index_type == ncclInt64) std::memcpy(&ids[i * sizeof own.ids[i]], &own.ids[i], sizeof own.ids[i]);
    }
    ids_->poison();
    ids_->write(ids);
}

void HtLayer::write_inputs() {
    const reference::RankInput& own = problem_.ranks[context_.rank()];
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
    if (scales_) scales_->poison(), scales_->write(scales);
}

void HtLayer::expect(const HtProblem& problem) {
    problem_ = problem;
    routing_.emplace(problem);
}

void HtLayer::refill(const HtProblem& problem) {
    expect(problem);
    write_routing();
}

void HtLayer::route(const HtProblem& problem) {
    refill(problem);
    prepare_update();
    RANK_OK(context_, update());
}

void HtLayer::change_data(uint64_t seed) { problem_.seed = seed; }

ncclResult_t HtLayer::dispatch(ncclEpPassDir_t direction) {
    const bool forward = direction == NCCL_EP_FWD_PASS;
    const bool flat = !problem_.expert_major();
    Call call(*this);
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
    Call call(*this);
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
