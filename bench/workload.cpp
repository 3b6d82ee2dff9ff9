// SPDX-License-Identifier: Apache-2.0
#include "bench/workload.h"

#include <algorithm>

#include "bench/rows.h"
#include "bench/stopwatch.h"

namespace crossdock::bench {
namespace {

// A peer that does not answer for so long is given up.
constexpr uint64_t kTimeoutNs = 30'000'000'000;

size_t at_least_one(size_t bytes) { return std::max<size_t>(bytes, 1); }

}  // namespace

Workload::Workload(const LibraryComm& library_comm, const tools::RankContext& context, const Options& options,
                   tools::Device& device, const std::vector<int32_t>& routing, const std::vector<float>& weights)
    : library_(library_comm.library()),
      options_(options),
      device_(device),
      comm_(library_comm),
      start_up_(library_comm.start_up()),
      num_zones_(static_cast<size_t>(options.is_expert_major() ? options.num_local() : options.num_ranks)),
      num_slots_(static_cast<size_t>(options.is_expert_major() ? options.num_ranks * options.max_tokens()
                                                               : options.max_tokens())),
      row_bytes_in_(static_cast<size_t>(options.hidden) * input_element_bytes(options)),
      row_bytes_out_(static_cast<size_t>(options.hidden) * output_element_bytes(options)),
      row_bytes_combine_(static_cast<size_t>(options.hidden) * combine_element_bytes(options)),
      tokens_(library_, comm(), options.world, device, static_cast<size_t>(options.max_tokens()) * row_bytes_in_,
              false),
      scales_(library_, comm(), options.world, device,
              at_least_one(static_cast<size_t>(options.max_tokens()) * num_scales(options) * sizeof(float)), false),
      routing_(library_, comm(), options.world, device, routing.size() * sizeof(int64_t), false),
      weights_(library_, comm(), options.world, device, weights.size() * sizeof(float), false),
      received_(library_, comm(), options.world, device, num_zones_ * num_slots_ * row_bytes_out_, options.windows),
      received_scales_(library_, comm(), options.world, device,
                       at_least_one(num_zones_ * num_slots_ * num_scales(options) * sizeof(float)),
                       options.windows && num_scales(options) > 0),
      received_experts_(library_, comm(), options.world, device,
                        num_zones_ * num_slots_ * static_cast<size_t>(options.topk) * sizeof(int32_t), false),
      received_weights_(library_, comm(), options.world, device,
                        num_zones_ * num_slots_ * static_cast<size_t>(options.topk) * sizeof(float), false),
      counters_(library_, comm(), options.world, device, num_zones_ * sizeof(int32_t), false),
      results_(library_, comm(), options.world, device, static_cast<size_t>(options.max_tokens()) * row_bytes_combine_,
               options.windows),
      dispatch_inputs_(make_struct<ncclEpDispatchInputs_t>()),
      dispatch_outputs_(make_struct<ncclEpDispatchOutputs_t>()),
      layout_info_(make_struct<ncclEpLayoutInfo_t>()),
      dispatch_config_(make_struct<ncclEpDispatchConfig_t>()),
      combine_inputs_(make_struct<ncclEpCombineInputs_t>()),
      combine_outputs_(make_struct<ncclEpCombineOutputs_t>()),
      combine_config_(make_struct<ncclEpCombineConfig_t>()) {
    if (options.recipe != NCCL_EP_DISP_QUANT_NONE) {
        expert_rows_ = std::make_unique<TensorMemory>(library_, comm(), options.world, device,
                                                      num_zones_ * num_slots_ * row_bytes_combine_, options.windows);
    }
    const std::vector<int64_t> wide(routing.begin(), routing.end());
    device.to_device(routing_.data(), wide.data(), wide.size() * sizeof(int64_t));
    device.to_device(weights_.data(), weights.data(), weights.size() * sizeof(float));
    for (int token = 0; token < options.max_tokens(); ++token) {
        const Row row = input_row(options, context.rank, token);
        const auto index = static_cast<size_t>(token);
        device.to_device(static_cast<uint8_t*>(tokens_.data()) + index * row_bytes_in_, row.bytes.data(),
                         row_bytes_in_);
        device.to_device(static_cast<float*>(scales_.data()) + index * row.scales.size(), row.scales.data(),
                         row.scales.size() * sizeof(float));
    }
    make_handle();
    select(options.max_tokens());
}

Workload::~Workload() {
    library_.handle_destroy(handle_);
    library_.group_destroy(group_);
}

void Workload::make_handle() {
    auto config = make_struct<ncclEpGroupConfig_t>();
    config.version = NCCL_EP_API_VERSION;
    config.algorithm = NCCL_EP_ALGO_LOW_LATENCY;
    config.num_experts = static_cast<unsigned>(options_.num_experts);
    config.max_dispatch_tokens_per_rank = static_cast<unsigned>(options_.max_tokens());
    config.max_token_bytes =
        static_cast<unsigned>(std::max(row_bytes_combine_, row_bytes_out_ + num_scales(options_) * sizeof(float)));
    config.timeout_ns = kTimeoutNs;
    // Only rank-major dispatch can promise windows that peers write (nccl_ep.h).
    config.zero_copy =
        options_.windows && !options_.is_expert_major() && options_.recipe != NCCL_EP_DISP_QUANT_DS_FP8E3M4
            ? NCCL_EP_ZERO_COPY_ON
            : NCCL_EP_ZERO_COPY_AUTO;
    config.max_num_sms = static_cast<unsigned>(options_.max_num_sms);
    const auto create_group = [&] {
        library_.check(library_.create_group(&group_, comm(), &config), "ncclEpCreateGroup");
    };
    const auto init_handle = [&] {
        library_.check(library_.init_handle(&handle_, group_, options_.layout, nullptr, options_.topk, nullptr),
                       "ncclEpInitHandle");
    };
    start_up_.group = time_us(create_group) * 1e-3;
    start_up_.handle = time_us(init_handle) * 1e-3;
    // Another library has the exact sums only, and is compared with what ours does on request.
    if (options_.sender_sums && library_.set_sums != nullptr) {
        library_.check(library_.set_sums(handle_, CROSSDOCK_SUMS_SENDER), "crossdockHandleSetSums");
    }
}

void Workload::select(int num_tokens) {
    const auto tokens = static_cast<size_t>(num_tokens);
    const auto hidden = static_cast<size_t>(options_.hidden);
    const auto topk = static_cast<size_t>(options_.topk);
    const size_t scales = num_scales(options_);
    const bool is_expert_major = options_.is_expert_major();
    const bool has_scales = scales > 0;
    const bool sends_scales = options_.recipe == NCCL_EP_DISP_QUANT_FWD;

    // Pointers into the vector stay valid: it is filled before they are taken.
    tensors_.clear();
    tensors_.push_back(tokens_.tensor(input_dtype(options_), {tokens, hidden}));
    tensors_.push_back(scales_.tensor(ncclFloat32, {tokens, scales}));
    tensors_.push_back(routing_.tensor(ncclInt64, {tokens, topk}));
    tensors_.push_back(weights_.tensor(ncclFloat32, {tokens, topk}));
    tensors_.push_back(received_.tensor(output_dtype(options_), {num_zones_, num_slots_, hidden}));
    tensors_.push_back(received_scales_.tensor(ncclFloat32, {num_zones_, num_slots_, scales}));
    tensors_.push_back(received_experts_.tensor(ncclInt32, {num_zones_, num_slots_, topk}));
    tensors_.push_back(received_weights_.tensor(ncclFloat32, {num_zones_, num_slots_, topk}));
    tensors_.push_back(counters_.tensor(ncclInt32, {num_zones_}));
    tensors_.push_back(memory_of_expert_rows().tensor(options_.dtype, {num_zones_, num_slots_, hidden}));
    tensors_.push_back(results_.tensor(options_.dtype, {tokens, hidden}));
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
    library_.check(library_.update_handle(handle_, pointer(kRouting), nullptr, device_.stream()), "ncclEpUpdateHandle");
}

void Workload::dispatch(bool send_only) {
    dispatch_config_.send_only = send_only;
    library_.check(library_.dispatch(handle_, &dispatch_inputs_, &dispatch_outputs_, &layout_info_, &dispatch_config_,
                                     device_.stream()),
                   "ncclEpDispatch");
}

void Workload::combine(bool send_only) {
    combine_config_.send_only = send_only;
    library_.check(library_.combine(handle_, &combine_inputs_, &combine_outputs_, &combine_config_, device_.stream()),
                   "ncclEpCombine");
}

void Workload::run(Operation operation, int count) {
    for (int i = 0; i < count; ++i) {
        if (operation != Operation::kCombine) {
            dispatch();
        }
        if (operation != Operation::kDispatch) {
            combine();
        }
    }
}

void Workload::send(Operation operation) {
    if (operation == Operation::kDispatch) {
        dispatch(true);
    } else {
        combine(true);
    }
}

void Workload::complete() { library_.check(library_.complete(handle_, nullptr, device_.stream()), "ncclEpComplete"); }

namespace {

// Elements first .. first + count - 1 of device memory.
template <class Element>
std::vector<Element> download(tools::Device& device, const TensorMemory& memory, size_t first, size_t count) {
    std::vector<Element> values(count);
    device.to_host(values.data(), static_cast<const Element*>(memory.data()) + first, count * sizeof(Element));
    return values;
}

}  // namespace

std::vector<int32_t> Workload::zone_counts() { return download<int32_t>(device_, counters_, 0, num_zones_); }

std::vector<uint8_t> Workload::received_row(size_t zone, size_t slot) {
    return download<uint8_t>(device_, received_, (zone * num_slots_ + slot) * row_bytes_out_, row_bytes_out_);
}

std::vector<float> Workload::received_scales(size_t zone, size_t slot) {
    const size_t count = num_scales(options_);
    return download<float>(device_, received_scales_, (zone * num_slots_ + slot) * count, count);
}

std::vector<int32_t> Workload::received_experts(size_t zone, size_t slot) {
    const auto topk = static_cast<size_t>(options_.topk);
    return download<int32_t>(device_, received_experts_, (zone * num_slots_ + slot) * topk, topk);
}

std::vector<float> Workload::received_weights(size_t zone, size_t slot) {
    const auto topk = static_cast<size_t>(options_.topk);
    return download<float>(device_, received_weights_, (zone * num_slots_ + slot) * topk, topk);
}

void Workload::set_expert_row(size_t zone, size_t slot, const std::vector<uint8_t>& row) {
    auto* rows = static_cast<uint8_t*>(memory_of_expert_rows().data());
    device_.to_device(rows + (zone * num_slots_ + slot) * row_bytes_combine_, row.data(), row.size());
}

std::vector<uint8_t> Workload::result_row(size_t token) {
    return download<uint8_t>(device_, results_, token * row_bytes_combine_, row_bytes_combine_);
}

}  // namespace crossdock::bench
