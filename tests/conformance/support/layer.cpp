// SPDX-License-Identifier: Apache-2.0
#include "conformance/support/layer.h"

#include "reference/formats.h"
#include "reference/recipes.h"
#include "src/core/recipes.h"

namespace crossdock::testing {

std::vector<size_t> row_extents(const Problem& problem, size_t num_rows, size_t width) {
    if (problem.is_ht()) return {num_rows, width};
    return {static_cast<size_t>(problem.num_blocks()), static_cast<size_t>(problem.slots()), width};
}

std::vector<size_t> weight_extents(const Problem& problem, size_t num_rows) {
    if (problem.is_ht() && problem.expert_major()) return {num_rows};
    return row_extents(problem, num_rows, static_cast<size_t>(problem.num_topk));
}

std::unique_ptr<Buffer> make_handle_memory(RankContext& context, ncclEpGroup_t group, const Problem& problem,
                                           cudaStream_t stream) {
    Fleeting<ncclEpHandleConfig_t> config{NCCL_EP_HANDLE_CONFIG_INIT};
    config->dispatch_output_per_expert_alignment = problem.alignment;
    size_t bytes = 0;
    RANK_OK(context, ncclEpHandleMemSize(group, problem.layout, config.get(), &bytes, problem.num_topk));
    return std::make_unique<Buffer>(context, stream, bytes);
}

ncclEpTensor_t* Layer::Call::tensor(ncclDataType_t type, const std::vector<size_t>& sizes, const Buffer* buffer) {
    if (buffer == nullptr) return nullptr;
    const Naming naming = buffer->arena() != nullptr ? naming_ : Naming::kData;
    Tensor& made = tensors_.emplace_back(type, sizes, *buffer, naming);
    // An empty tensor has no address to give.
    if (naming == Naming::kData && sizes[0] == 0) made->data = nullptr;
    return made;
}

Layer::Layer(RankContext& context, ncclEpGroup_t group, const Problem& problem, const LayerOptions& options,
             cudaStream_t stream)
    : context_(context),
      group_(group),
      stream_(stream != nullptr ? stream : context.make_stream()),
      problem_(problem),
      options_(options),
      sms_(options.sms_seed) {
    if (problem.is_ht()) lsa_team_size_ = static_cast<int>(traffic_of(context, group).lsa_team_size);
    make_buffers();
    refill(problem);
    const ncclResult_t made = make_handle();
    if (made == ncclRemoteError && options.peers_may_die && !problem.is_ht())
        throw StopProgram("no handle without the dead");
    RANK_OK(context_, made);
    if (problem.expert_major() && problem.sums != CROSSDOCK_SUMS_EXACT)
        RANK_OK(context_, crossdockHandleSetSums(handle(), problem.sums));
    if (options.overlap_rows > 0 && (!problem.is_ht() || problem.expert_major()))
        overlap_.emplace(context, stream_, handle(), problem, options.overlap_rows);
}

Layer::~Layer() {
    const ncclResult_t result = ncclEpHandleDestroy(handle_.release());
    RANK_CHECK(context_, result == ncclSuccess, "ncclEpHandleDestroy answered {}: {}", result_name(result),
               crossdockGetLastError());
}

void Layer::make_buffers() {
    const size_t max_tokens = static_cast<size_t>(problem_.max_tokens);
    const size_t limit = !problem_.is_ht() ? num_rows() : problem_.budget != 0 ? problem_.budget : problem_.most_rows();
    const size_t rows = limit + options_.extra_rows;
    const size_t metadata_rows = limit + std::max(options_.extra_metadata_rows, options_.extra_rows);
    const size_t weights_bytes = static_cast<size_t>(reference::num_weights(problem_)) * sizeof(float);
    ids_ = make_buffer(max_tokens * topk() * sizeof(int64_t), kOtherTensors);  // an update may bring another width
    tokens_ = make_buffer(max_tokens * problem_.token_row_bytes(), kInputs);
    weights_ = make_buffer(max_tokens * topk() * sizeof(float), kOtherTensors);
    received_ = make_buffer(rows * problem_.received_row_bytes(), kOutputs);
    if (problem_.has_scales()) {
        const size_t shift = options_.odd_scales ? problem_.scale_row_bytes() / problem_.num_scales : 0;
        received_scales_ = make_buffer(rows * problem_.scale_row_bytes(), kOutputs, shift);
        if (problem_.recipe == NCCL_EP_DISP_QUANT_FWD)
            scales_ = make_buffer(max_tokens * problem_.scale_row_bytes(), kInputs, shift);
    }
    const bool fits = problem_.received_type() == problem_.combine_type && problem_.hidden == problem_.combine_hidden;
    if (!options_.in_place || !fits) combine_input_ = make_buffer(rows * problem_.combine_row_bytes(), kCombineInput);
    combine_output_ = make_buffer(max_tokens * problem_.combine_row_bytes(), kOtherTensors);
    if (recipe_of(problem_.combine_recipe).takes_row_scales)
        combine_scales_ = make_buffer(rows * sizeof(float), kOtherTensors);

    dispatch_numbers_ = make_numbers();
    if (problem_.is_ht() || !problem_.expert_major())
        received_weights_ = make_buffer(metadata_rows * weights_bytes, kOtherTensors);
    if (!problem_.expert_major())
        received_ids_ = make_buffer(metadata_rows * topk() * reference::type_bytes(id_type(problem_)), kOtherTensors);
    if (!problem_.is_ht()) return;
    update_numbers_ = make_numbers();
    gradients_ = make_buffer(rows * weights_bytes, kOtherTensors);
    combined_gradients_ = make_buffer(max_tokens * topk() * sizeof(float), kOtherTensors);
}

Layer::Numbers Layer::make_numbers() {
    // Offsets and total have an extent more than needed, which must stay as it is; so have high throughput's counters.
    return {make_buffer(num_counters() * sizeof(int64_t), kOtherTensors),
            make_buffer((local_experts() + 1) * sizeof(int64_t), kOtherTensors),
            make_buffer(2 * sizeof(int64_t), kOtherTensors)};
}

std::unique_ptr<Buffer> Layer::make_buffer(size_t bytes, unsigned kind, size_t shift) {
    WindowArena* const arena = (options_.windows & kind) != 0 ? options_.arena : nullptr;
    return std::make_unique<Buffer>(context_, stream_, bytes, arena, shift);
}

ncclResult_t Layer::make_handle() {
    Fleeting<ncclEpHandleConfig_t> config{NCCL_EP_HANDLE_CONFIG_INIT};
    config->dispatch_output_per_expert_alignment = problem_.alignment;
    ncclEpHandleConfig_t* const given = options_.null_configs && problem_.alignment <= 1 ? nullptr : config.get();
    ncclEpHandle_t handle = nullptr;
    Call call(options_.naming);
    if (options_.create_in_one_call) {
        is_updated_ = true;
        Fleeting<ncclEpLayoutInfo_t> info(numbers_info(call, update_numbers_));
        const ncclResult_t result = ncclEpCreateHandle(&handle, group_, problem_.layout, ids_tensor(call),
                                                       problem_.is_ht() ? info.get() : nullptr, given, stream_);
        handle_.reset(handle);
        return result;
    }
    if (options_.own_handle_memory) handle_memory_ = make_handle_memory(context_, group_, problem_, stream_);
    const Buffer* const memory = handle_memory_ ? handle_memory_.get() : options_.handle_memory;
    ncclEpTensor_t* const tensor = call.tensor(ncclUint8, {memory != nullptr ? memory->bytes() : 0}, memory);
    const int num_topk = options_.open_topk ? -1 : problem_.num_topk;
    const ncclResult_t result = ncclEpInitHandle(&handle, group_, problem_.layout, given, num_topk, tensor);
    handle_.reset(handle);
    return result == ncclSuccess && !options_.without_update ? update() : result;
}

void Layer::expect(const Problem& problem) {
    problem_ = problem;
    if (problem.is_ht()) routing_.emplace(problem);
}

void Layer::refill(const Problem& problem) {
    expect(problem);
    write_routing();
    // High throughput's are written before each dispatch, which leaves poison in them; a low-latency combine reads the
    // weights again.
    if (!problem.is_ht()) write_inputs();
}

void Layer::route(const Problem& problem) {
    refill(problem);
    prepare_update();
    RANK_OK(context_, update());
}

void Layer::write_routing() {
    ids_->poison();
    ids_->write(as_integers(problem_.index_type, problem_.ranks[context_.rank()].ids));
}

void Layer::write_inputs() {
    const reference::RankInput& own = problem_.ranks[context_.rank()];
    Bytes tokens;
    Bytes scales;
    for (int token = 0; token < own.num_tokens; ++token) {
        const Bytes row = token_row(problem_, context_.rank(), token);
        tokens.insert(tokens.end(), row.begin(), row.end());
        if (!scales_) continue;
        const Bytes scale = scale_row(problem_, context_.rank(), token);
        scales.insert(scales.end(), scale.begin(), scale.end());
    }
    poison({weights_.get(), tokens_.get(), scales_.get()});
    weights_->write(as_bytes(own.weights));
    tokens_->write(tokens);
    if (scales_) scales_->write(scales);
}

void Layer::poison(std::initializer_list<Buffer*> buffers) {
    for (Buffer* buffer : buffers) {
        if (buffer != nullptr) buffer->poison();
    }
}

}  // namespace crossdock::testing
