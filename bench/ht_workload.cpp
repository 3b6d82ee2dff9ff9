// SPDX-License-Identifier: Apache-2.0
#include "bench/ht_workload.h"

#include <algorithm>
#include <stdexcept>

#include "bench/rows.h"
#include "bench/stopwatch.h"

namespace crossdock::bench {

HtWorkload::HtWorkload(const LibraryComm& comm, const tools::RankContext& context, const Options& options,
                       tools::Device& device, const std::vector<int32_t>& routing, const std::vector<float>& weights)
    : Workload(comm, context, options, device),
      capacity_(static_cast<size_t>(options.budget)),
      row_bytes_in_(static_cast<size_t>(options.hidden) * input_element_bytes(options)),
      row_bytes_combine_(static_cast<size_t>(options.hidden) * combine_element_bytes(options)),
      layout_info_(make_struct<ncclEpLayoutInfo_t>()),
      dispatch_inputs_(make_struct<ncclEpDispatchInputs_t>()),
      dispatch_outputs_(make_struct<ncclEpDispatchOutputs_t>()),
      dispatch_config_(make_struct<ncclEpDispatchConfig_t>()),
      combine_inputs_(make_struct<ncclEpCombineInputs_t>()),
      combine_outputs_(make_struct<ncclEpCombineOutputs_t>()),
      combine_config_(make_struct<ncclEpCombineConfig_t>()) {
    const auto max_tokens = static_cast<size_t>(options.max_tokens());
    const auto num_local = static_cast<size_t>(options.num_local());
    const size_t scales_bytes = num_scales(options) * sizeof(float);
    tokens_ = allocate(max_tokens * row_bytes_in_, options.windows);
    scales_ = allocate(max_tokens * scales_bytes, options.windows && scales_bytes > 0);
    routing_ = allocate(routing.size() * sizeof(int64_t));
    weights_ = allocate(weights.size() * sizeof(float));
    received_ = allocate(capacity_ * row_bytes_in_, options.windows);
    received_scales_ = allocate(capacity_ * scales_bytes, options.windows && scales_bytes > 0);
    received_experts_ = allocate(options.is_expert_major() ? 0 : capacity_ * topk() * sizeof(int64_t));
    received_weights_ = allocate(capacity_ * weights_per_row() * sizeof(float));
    counters_ = allocate(num_local * sizeof(int32_t));
    offsets_ = allocate(num_local * sizeof(int32_t));
    total_ = allocate(sizeof(int32_t));
    expert_rows_ = options.recipe == NCCL_EP_DISP_QUANT_NONE
                       ? received_
                       : allocate(capacity_ * row_bytes_combine_, options.windows);
    expert_weights_ = allocate(options.backward ? capacity_ * weights_per_row() * sizeof(float) : 0);
    results_ = allocate(max_tokens * row_bytes_combine_, options.windows);
    result_weights_ = allocate(options.backward ? max_tokens * topk() * sizeof(float) : 0);
    sources_ = allocate(options.elastic ? capacity_ * (topk() + 2) * sizeof(int32_t) : 0);
    rank_ends_ = allocate(static_cast<size_t>(options.num_ranks) * sizeof(int32_t));
    if (options.elastic && library_.elastic_dispatch == nullptr) {
        throw std::runtime_error(library_.name + ": has no elastic operations, which --elastic times");
    }
    routing_->upload(0, std::vector<int64_t>(routing.begin(), routing.end()));
    weights_->upload(0, weights);
    for (int token = 0; token < options.max_tokens(); ++token) {
        const Row row = input_row(options, context.rank, token);
        tokens_->upload(static_cast<size_t>(token) * row_bytes_in_, row.bytes);
        scales_->upload(static_cast<size_t>(token) * row.scales.size(), row.scales);
    }

    auto config = make_struct<ncclEpGroupConfig_t>();
    config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
    config.max_recv_tokens_per_rank = options.eager ? NCCL_EP_AUTO : static_cast<unsigned>(options.budget);
    config.max_token_bytes = static_cast<unsigned>(std::max(row_bytes_combine_, row_bytes_in_ + scales_bytes));
    config.zero_copy = options.windows ? NCCL_EP_ZERO_COPY_ON : NCCL_EP_ZERO_COPY_AUTO;
    config.num_topk = static_cast<unsigned>(options.topk);
    auto handle_config = make_struct<ncclEpHandleConfig_t>();
    handle_config.dispatch_output_per_expert_alignment = static_cast<size_t>(options.alignment);
    make_handle(config, &handle_config);
    start_up_.first_operations = time_us([&] { HtWorkload::select(options.max_tokens()); }) * 1e-3;
    note_memory();
}

void HtWorkload::select(int num_tokens) {
    const auto tokens = static_cast<size_t>(num_tokens);
    set_tensors(tokens, capacity_);
    update();
    if (options_.eager) {
        device_.synchronize();
        set_tensors(tokens, static_cast<size_t>(total()));
    }
    dispatch(false);
    combine(false);
    device_.synchronize();
}

Work HtWorkload::work(Operation operation) {
    Work work = Workload::work(operation);
    if (operation == Operation::kUpdate && !library_.is_crossdock()) {
        work.settle = [this] { dispatch(false); };
    }
    work.capturable =
        !options_.eager || options_.elastic || operation == Operation::kUpdate || operation == Operation::kCombine;
    return work;
}

void HtWorkload::set_tensors(size_t num_tokens, size_t num_rows) {
    const auto hidden = static_cast<size_t>(options_.hidden);
    const auto num_local = static_cast<size_t>(options_.num_local());
    const size_t scales = num_scales(options_);
    const bool is_expert_major = options_.is_expert_major();
    const bool is_forward = !options_.backward;
    num_rows_ = num_rows;

    // Pointers into the vector stay valid: it has its capacity before they are taken.
    tensors_.clear();
    tensors_.reserve(24);
    const auto add = [this](TensorMemory* memory, ncclDataType_t dtype, std::initializer_list<size_t> extents) {
        tensors_.push_back(memory->tensor(dtype, extents));
        return tensors_.back().get();
    };
    const auto add_weights = [&](TensorMemory* memory) {
        return is_expert_major ? add(memory, ncclFloat32, {num_rows}) : add(memory, ncclFloat32, {num_rows, topk()});
    };
    topk_idx_ = add(routing_, ncclInt64, {num_tokens, topk()});
    layout_info_.expert_counters = add(counters_, ncclInt32, {num_local});
    layout_info_.expert_offsets = is_expert_major ? add(offsets_, ncclInt32, {num_local}) : nullptr;
    layout_info_.recv_total_counter = add(total_, ncclInt32, {1});

    dispatch_inputs_.tokens = add(tokens_, input_dtype(options_), {num_tokens, hidden});
    dispatch_inputs_.scales = scales > 0 ? add(scales_, ncclFloat32, {num_tokens, scales}) : nullptr;
    dispatch_inputs_.topk_weights = is_forward ? add(weights_, ncclFloat32, {num_tokens, topk()}) : nullptr;
    dispatch_outputs_.tokens = add(received_, output_dtype(options_), {num_rows, hidden});
    dispatch_outputs_.scales = scales > 0 ? add(received_scales_, ncclFloat32, {num_rows, scales}) : nullptr;
    dispatch_outputs_.topk_weights = is_forward ? add_weights(received_weights_) : nullptr;
    dispatch_outputs_.topk_idx =
        is_forward && !is_expert_major ? add(received_experts_, ncclInt64, {num_rows, topk()}) : nullptr;
    dispatch_config_.pass_direction = is_forward ? NCCL_EP_FWD_PASS : NCCL_EP_BWD_PASS;
    dispatch_config_.quant_recipe = options_.recipe;

    combine_inputs_.tokens = add(expert_rows_, options_.dtype, {num_rows, hidden});
    combine_inputs_.topk_weights = is_forward ? nullptr : add_weights(expert_weights_);
    combine_outputs_.tokens = add(results_, options_.dtype, {num_tokens, hidden});
    combine_outputs_.topk_weights = is_forward ? nullptr : add(result_weights_, ncclFloat32, {num_tokens, topk()});
    combine_config_.pass_direction = dispatch_config_.pass_direction;
    combine_config_.quant_recipe = options_.combine_recipe;
    if (options_.elastic) {
        set_elastic();
    }
}

// The same tensors, and what only elastic operations write.
void HtWorkload::set_elastic() {
    const auto num_ranks = static_cast<size_t>(options_.num_ranks);
    const auto add = [this](TensorMemory* memory, std::initializer_list<size_t> extents) {
        tensors_.push_back(memory->tensor(ncclInt32, extents));
        return tensors_.back().get();
    };
    elastic_dispatch_.tokens = dispatch_inputs_.tokens;
    elastic_dispatch_.scales = dispatch_inputs_.scales;
    elastic_dispatch_.topk_weights = dispatch_inputs_.topk_weights;
    elastic_dispatch_.origin_stride = static_cast<unsigned>(options_.max_tokens());
    elastic_dispatch_.out_tokens = dispatch_outputs_.tokens;
    elastic_dispatch_.out_scales = dispatch_outputs_.scales;
    elastic_dispatch_.out_topk_weights = dispatch_outputs_.topk_weights;
    elastic_dispatch_.out_topk_idx = dispatch_outputs_.topk_idx;
    elastic_dispatch_.sources = add(sources_, {num_rows_, topk() + 2});
    elastic_dispatch_.rank_ends = add(rank_ends_, {num_ranks});
    elastic_combine_.tokens = combine_inputs_.tokens;
    elastic_combine_.out_tokens = combine_outputs_.tokens;
}

void HtWorkload::update() {
    library_.check(library_.update_handle(handle_, topk_idx_, &layout_info_, device_.stream()), "ncclEpUpdateHandle");
}

void HtWorkload::dispatch(bool send_only) {
    if (options_.elastic) {
        return library_.check(library_.elastic_dispatch(handle_, &elastic_dispatch_, device_.stream()),
                              "crossdockElasticDispatch");
    }
    dispatch_config_.send_only = send_only;
    library_.check(
        library_.dispatch(handle_, &dispatch_inputs_, &dispatch_outputs_, nullptr, &dispatch_config_, device_.stream()),
        "ncclEpDispatch");
}

void HtWorkload::combine(bool send_only) {
    if (options_.elastic) {
        return library_.check(library_.elastic_combine(handle_, &elastic_combine_, device_.stream()),
                              "crossdockElasticCombine");
    }
    combine_config_.send_only = send_only;
    library_.check(library_.combine(handle_, &combine_inputs_, &combine_outputs_, &combine_config_, device_.stream()),
                   "ncclEpCombine");
}

std::vector<int32_t> HtWorkload::expert_counts() const {
    return counters_->download<int32_t>(0, static_cast<size_t>(options_.num_local()));
}

std::vector<int32_t> HtWorkload::expert_offsets() const {
    return offsets_->download<int32_t>(0, static_cast<size_t>(options_.num_local()));
}

std::vector<uint8_t> HtWorkload::received_rows(size_t first, size_t count) const {
    return received_->download<uint8_t>(first * row_bytes_in_, count * row_bytes_in_);
}

std::vector<float> HtWorkload::received_scales(size_t first, size_t count) const {
    return received_scales_->download<float>(first * num_scales(options_), count * num_scales(options_));
}

std::vector<int64_t> HtWorkload::received_experts(size_t first, size_t count) const {
    return received_experts_->download<int64_t>(first * topk(), count * topk());
}

std::vector<float> HtWorkload::received_weights(size_t first, size_t count) const {
    return received_weights_->download<float>(first * weights_per_row(), count * weights_per_row());
}

void HtWorkload::set_expert_rows(size_t first, const std::vector<uint8_t>& rows) {
    expert_rows_->upload(first * row_bytes_combine_, rows);
}

void HtWorkload::set_expert_weights(size_t first, const std::vector<float>& weights) {
    expert_weights_->upload(first * weights_per_row(), weights);
}

std::vector<uint8_t> HtWorkload::result_rows(size_t first, size_t count) const {
    return results_->download<uint8_t>(first * row_bytes_combine_, count * row_bytes_combine_);
}

std::vector<float> HtWorkload::result_weights(size_t first, size_t count) const {
    return result_weights_->download<float>(first * topk(), count * topk());
}

}  // namespace crossdock::bench
