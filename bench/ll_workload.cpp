// SPDX-License-Identifier: Apache-2.0
#include "bench/ll_workload.h"

#include <algorithm>

#include "bench/rows.h"

namespace crossdock::bench {

LlWorkload::LlWorkload(const LibraryComm& comm, const tools::RankContext& context, const Options& options,
                       tools::Device& device, const std::vector<int32_t>& routing, const std::vector<float>& weights)
    : Workload(comm, context, options, device),
      num_zones_(static_cast<size_t>(options.is_expert_major() ? options.num_local() : options.num_ranks)),
      num_slots_(static_cast<size_t>(options.is_expert_major() ? options.num_ranks * options.max_tokens()
                                                               : options.max_tokens())),
      row_bytes_in_(static_cast<size_t>(options.hidden) * input_element_bytes(options)),
      row_bytes_out_(static_cast<size_t>(options.hidden) * output_element_bytes(options)),
      row_bytes_combine_(static_cast<size_t>(options.hidden) * combine_element_bytes(options)),
      dispatch_inputs_(make_struct<ncclEpDispatchInputs_t>()),
      dispatch_outputs_(make_struct<ncclEpDispatchOutputs_t>()),
      layout_info_(make_struct<ncclEpLayoutInfo_t>()),
      dispatch_config_(make_struct<ncclEpDispatchConfig_t>()),
      combine_inputs_(make_struct<ncclEpCombineInputs_t>()),
      combine_outputs_(make_struct<ncclEpCombineOutputs_t>()),
      combine_config_(make_struct<ncclEpCombineConfig_t>()) {
    const auto max_tokens = static_cast<size_t>(options.max_tokens());
    const auto topk = static_cast<size_t>(options.topk);
    const size_t num_rows = num_zones_ * num_slots_;
    tokens_ = allocate(max_tokens * row_bytes_in_);
    scales_ = allocate(max_tokens * num_scales(options) * sizeof(float));
    routing_ = allocate(routing.size() * sizeof(int64_t));
    weights_ = allocate(weights.size() * sizeof(float));
    received_ = allocate(num_rows * row_bytes_out_, options.windows);
    received_scales_ =
        allocate(num_rows * num_scales(options) * sizeof(float), options.windows && num_scales(options) > 0);
    received_experts_ = allocate(num_rows * topk * sizeof(int32_t));
    received_weights_ = allocate(num_rows * topk * sizeof(float));
    counters_ = allocate(num_zones_ * sizeof(int32_t));
    results_ = allocate(max_tokens * row_bytes_combine_, options.windows);
    expert_rows_ = options.recipe == NCCL_EP_DISP_QUANT_NONE ? received_
                                                             : allocate(num_rows * row_bytes_combine_, options.windows);
    if (options.int32_ids) {
        routing_->upload(0, routing);
    } else {
        routing_->upload(0, std::vector<int64_t>(routing.begin(), routing.end()));
    }
    weights_->upload(0, weights);
    for (int token = 0; token < options.max_tokens(); ++token) {
        const Row row = input_row(options, context.rank, token);
        tokens_->upload(static_cast<size_t>(token) * row_bytes_in_, row.bytes);
        scales_->upload(static_cast<size_t>(token) * row.scales.size(), row.scales);
    }

    auto config = make_struct<ncclEpGroupConfig_t>();
    config.algorithm = NCCL_EP_ALGO_LOW_LATENCY;
    config.enable_mask = options.masks ? 1 : 0;
    config.max_token_bytes =
        static_cast<unsigned>(std::max(row_bytes_combine_, row_bytes_out_ + num_scales(options) * sizeof(float)));
    // Only rank-major dispatch can promise windows that peers write (nccl_ep.h).
    config.zero_copy = options.windows && !options.is_expert_major() && !options.quantises() ? NCCL_EP_ZERO_COPY_ON
                                                                                             : NCCL_EP_ZERO_COPY_AUTO;
    make_handle(config, nullptr);
    // Another library has the exact sums only, and is compared with what ours does on request.
    if (options.sender_sums && library_.set_sums != nullptr) {
        library_.check(library_.set_sums(handle_, CROSSDOCK_SUMS_SENDER), "crossdockHandleSetSums");
    }
    LlWorkload::select(options.max_tokens());
}

void LlWorkload::select(int num_tokens) {
    const auto tokens = static_cast<size_t>(num_tokens);
    const auto hidden = static_cast<size_t>(options_.hidden);
    const auto topk = static_cast<size_t>(options_.topk);
    const size_t scales = num_scales(options_);
    const bool is_expert_major = options_.is_expert_major();
    const bool has_scales = scales > 0;
    const bool sends_scales = options_.recipe == NCCL_EP_DISP_QUANT_FWD;

    // Pointers into the vector stay valid: it is filled before they are taken.
    tensors_.clear();
    tensors_.push_back(tokens_->tensor(input_dtype(options_), {tokens, hidden}));
    tensors_.push_back(scales_->tensor(ncclFloat32, {tokens, scales}));
    tensors_.push_back(routing_->tensor(options_.int32_ids ? ncclInt32 : ncclInt64, {tokens, topk}));
    tensors_.push_back(weights_->tensor(ncclFloat32, {tokens, topk}));
    tensors_.push_back(received_->tensor(output_dtype(options_), {num_zones_, num_slots_, hidden}));
    tensors_.push_back(received_scales_->tensor(ncclFloat32, {num_zones_, num_slots_, scales}));
    tensors_.push_back(received_experts_->tensor(ncclInt32, {num_zones_, num_slots_, topk}));
    tensors_.push_back(received_weights_->tensor(ncclFloat32, {num_zones_, num_slots_, topk}));
    tensors_.push_back(counters_->tensor(ncclInt32, {num_zones_}));
    tensors_.push_back(expert_rows_->tensor(options_.dtype, {num_zones_, num_slots_, hidden}));
    tensors_.push_back(results_->tensor(options_.dtype, {tokens, hidden}));
    enum {
        kTokens,
        kScales,
        kRouting,
        kWeights,
        kReceived,
        kReceivedScales,
        kReceivedExperts,
        kReceivedWeights,
        kCounters,
        kRows,
        kResults
    };
    const auto pointer = [this](int index) { return tensors_[static_cast<size_t>(index)].get(); };

    dispatch_inputs_.tokens = pointer(kTokens);
    dispatch_inputs_.scales = sends_scales ? pointer(kScales) : nullptr;
    dispatch_inputs_.topk_weights = is_expert_major ? nullptr : pointer(kWeights);
    dispatch_outputs_.tokens = pointer(kReceived);
    dispatch_outputs_.scales = has_scales ? pointer(kReceivedScales) : nullptr;
    dispatch_outputs_.topk_idx = is_expert_major ? nullptr : pointer(kReceivedExperts);
    dispatch_outputs_.topk_weights = is_expert_major ? nullptr : pointer(kReceivedWeights);
    layout_info_.expert_counters = is_expert_major ? pointer(kCounters) : nullptr;
    layout_info_.src_rank_counters = is_expert_major ? nullptr : pointer(kCounters);
    dispatch_config_.quant_recipe = options_.recipe;
    combine_inputs_.tokens = pointer(kRows);
    combine_outputs_.tokens = pointer(kResults);
    combine_outputs_.topk_weights = is_expert_major ? pointer(kWeights) : nullptr;
    topk_idx_ = pointer(kRouting);
    update();
}

void LlWorkload::update() {
    library_.check(library_.update_handle(handle_, topk_idx_, nullptr, device_.stream()), "ncclEpUpdateHandle");
}

void LlWorkload::dispatch(bool send_only) {
    dispatch_config_.send_only = send_only;
    library_.check(library_.dispatch(handle_, &dispatch_inputs_, &dispatch_outputs_, &layout_info_, &dispatch_config_,
                                     device_.stream()),
                   "ncclEpDispatch");
}

void LlWorkload::combine(bool send_only) {
    combine_config_.send_only = send_only;
    library_.check(library_.combine(handle_, &combine_inputs_, &combine_outputs_, &combine_config_, device_.stream()),
                   "ncclEpCombine");
}

std::vector<int32_t> LlWorkload::zone_counts() { return counters_->download<int32_t>(0, num_zones_); }

std::vector<uint8_t> LlWorkload::received_row(size_t zone, size_t slot) {
    return received_->download<uint8_t>((zone * num_slots_ + slot) * row_bytes_out_, row_bytes_out_);
}

std::vector<float> LlWorkload::received_scales(size_t zone, size_t slot) {
    const size_t count = num_scales(options_);
    return received_scales_->download<float>((zone * num_slots_ + slot) * count, count);
}

std::vector<int32_t> LlWorkload::received_experts(size_t zone, size_t slot) {
    const auto topk = static_cast<size_t>(options_.topk);
    return received_experts_->download<int32_t>((zone * num_slots_ + slot) * topk, topk);
}

std::vector<float> LlWorkload::received_weights(size_t zone, size_t slot) {
    const auto topk = static_cast<size_t>(options_.topk);
    return received_weights_->download<float>((zone * num_slots_ + slot) * topk, topk);
}

void LlWorkload::set_expert_row(size_t zone, size_t slot, const std::vector<uint8_t>& row) {
    expert_rows_->upload((zone * num_slots_ + slot) * row_bytes_combine_, row);
}

std::vector<uint8_t> LlWorkload::result_row(size_t token) {
    return results_->download<uint8_t>(token * row_bytes_combine_, row_bytes_combine_);
}

}  // namespace crossdock::bench
