// SPDX-License-Identifier: Apache-2.0
// ncclEpDispatch in high-throughput mode: checks the caller's structs and tensors against the contract and fills in the
// kernel's arguments.
#include <algorithm>

#include "core/enum_table.h"
#include "core/error.h"
#include "core/ht/handle.h"
#include "core/ht/plan.h"
#include "core/recipes.h"
#include "core/structs.h"
#include "kernels/ht/launch.h"

namespace crossdock {
namespace {

void expect_rows_of_granules(const Tensor& tensor) {
    require(tensor.sizes[0] == 0 || (tensor.row_bytes() > 0 && tensor.row_bytes() % kRowGranule == 0),
            ncclInvalidArgument, "{} has rows of {} bytes, allowed: positive multiples of {}", tensor.name,
            tensor.row_bytes(), kRowGranule);
}

// Bytes of a row of two tensors that hold the same rows; either may be empty.
size_t shared_row_bytes(const Tensor& source, const Tensor& target) {
    const size_t bytes = target.num_elements() > 0 ? target.row_bytes() : source.row_bytes();
    require(source.num_elements() == 0 || target.num_elements() == 0 || source.row_bytes() == bytes,
            ncclInvalidArgument, "{} has rows of {} bytes, expected as {}: {}", source.name, source.row_bytes(),
            target.name, bytes);
    return bytes;
}

// GPU windows have no numbers. But NCCL maps the windows of all ranks alike, so a tensor's distance from the arena
// tells them apart. Returns a hash of it.
uint64_t place_beside_arena(const HtCommon& common, const PeerMap& window) {
    if (window.table != nullptr) return 0;
    const auto distance = window.at(common.rank, 0) - common.peers.at(common.rank, 0);
    return hash_of(static_cast<uint64_t>(distance), 63);
}

// Peers may access these tensors, which lie in windows.
void set_windows(HtDispatchArgs& args, const Tensor& tokens, const std::optional<Tensor>& scales) {
    args.common.has_windows = true;
    args.token_windows = *tokens.window;
    args.common.window_offset = folded_window_offset(tokens.window_place.offset);
    args.common.window_places = tokens.window_place.hash();
    args.common.window_rows = args.row_bytes == 0 ? 0 : tokens.window_bytes / args.row_bytes;
    if (!scales) return;
    args.scale_windows = *scales->window;
    args.common.window_places += 3 * scales->window_place.hash();
    if (args.scale_bytes > 0)
        args.common.window_rows = std::min(args.common.window_rows, scales->window_bytes / args.scale_bytes);
}

}  // namespace

void HtHandle::dispatch(const ncclEpDispatchInputs_t* caller_inputs, const ncclEpDispatchOutputs_t* caller_outputs,
                        const ncclEpLayoutInfo_t* caller_info, const ncclEpDispatchConfig_t* caller_config,
                        cudaStream_t stream) {
    group_->expect_working();
    const auto inputs = mandatory_struct(caller_inputs, NCCL_EP_DISPATCH_INPUTS_V1_SIZE, "inputs");
    const auto outputs = mandatory_struct(caller_outputs, NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE, "outputs");
    const auto config = optional_struct(caller_config, NCCL_EP_DISPATCH_CONFIG_V1_SIZE, "config");
    const auto info = optional_struct(caller_info, NCCL_EP_LAYOUT_INFO_V1_SIZE, "layout_info");
    const unsigned int direction = enum_bits(config.pass_direction);
    require(direction <= NCCL_EP_BWD_PASS, ncclInvalidArgument,
            "config->pass_direction is {}, allowed: 0 (forward), 1 (backward)", direction);
    const DispatchRecipe& recipe = row_of_mode(kDispatchRecipes, enum_bits(config.quant_recipe),
                                               NCCL_EP_ALGO_HIGH_THROUGHPUT, "config->quant_recipe");
    require(!recipe.forwards_scales || config.round_scales == 0, ncclInvalidArgument,
            "config->round_scales is {}, allowed with recipe {}: 0", config.round_scales, recipe.label);
    DeviceScope device(group_->runtime());
    const bool is_capturing = group_->runtime().is_capturing(stream);
    // A backward pass need not read the total if the host knows how many rows arrive.
    require(
        !is_eager() || !is_capturing || (direction == NCCL_EP_BWD_PASS && total_), ncclInvalidUsage,
        "dispatch of an eager group (max_recv_tokens_per_rank 0) cannot be captured, except for a backward pass whose "
        "number of rows has been asked for: set a budget");
    expect_routing(stream, inputs.tokens, "inputs->tokens");

    // Version switch: API v1 requires no more rows than arrive.
    const bool is_v1 = group_->config().api_version == 1 &&
                       (caller_config == nullptr || caller_config->size < NCCL_EP_DISPATCH_CONFIG_V2_SIZE);
    HtPublishingDispatchArgs args{};
    CallMemory memory;
    args.common = common(OperationKind::kDispatch, blocks().dispatch);
    read_dispatch_tensors(inputs, outputs, recipe.forwards_scales, args, !is_eager() && (!is_v1 || is_capturing),
                          memory);
    if (direction == NCCL_EP_BWD_PASS) {
        expect_absent(inputs.topk_weights, "inputs->topk_weights", "in a backward pass");
        expect_absent(outputs.topk_weights, "outputs->topk_weights", "in a backward pass");
        expect_absent(outputs.topk_idx, "outputs->topk_idx", "in a backward pass");
    } else {
        read_dispatch_weights(inputs, outputs, args, memory);
        const unsigned int id_kind = is_expert_major() ? 0u : enum_bits(info.recv_topk_idx_kind);
        require(id_kind <= NCCL_EP_EXPERT_ID_GLOBAL, ncclInvalidArgument,
                "layout_info->recv_topk_idx_kind is {}, allowed: 0 (auto), 1 (local), 2 (global)", id_kind);
        args.global_ids = id_kind == NCCL_EP_EXPERT_ID_GLOBAL;
        if (is_expert_major()) args.counters = read_counters(info, memory);
    }
    memory.expect_apart();
    args.common.terms = args.common.terms.with(Term::kDirection, direction).with(Term::kRecipe, recipe.value);
    add_agreed(args.common);
    const LaunchShape shape = plan_ht_dispatch(*group_, args);
    before_operation(stream);
    args.published = published_;
    if (published_.memory != nullptr) {
        launch<HtPublishingDispatch>(group_->runtime(), args, shape, stream);
    } else {
        launch<HtDispatch>(group_->runtime(), args, shape, stream);
    }
    group_->after_operation(stream);
}

// Checks that a tensor of received rows is long enough: for the budget, or for the rows that arrive.
void HtHandle::expect_rows(const Tensor& tensor, bool needs_all_rows) {
    const size_t rows = tensor.ndim == 0 ? 0 : tensor.sizes[0];
    if (needs_all_rows) {
        require(rows >= budget(), ncclInvalidArgument,
                "{} has {} rows, expected at least max_recv_tokens_per_rank ({})", tensor.name, rows, budget());
        return;
    }
    if (rows >= budget()) return;
    learn_total(true);
    if (!total_) return;
    const uint32_t received = std::min(*total_, budget());
    require(rows >= received, ncclInvalidArgument, "{} has {} rows, expected at least the {} received ones",
            tensor.name, rows, received);
}

void HtHandle::read_dispatch_tensors(const ncclEpDispatchInputs_t& inputs, const ncclEpDispatchOutputs_t& outputs,
                                     bool with_scales, HtDispatchArgs& args, bool needs_all_rows, CallMemory& memory) {
    const GroupConfig& config = group_->config();
    Communicator& communicator = group_->communicator();
    const Tensor source = read_tensor(communicator, inputs.tokens, "inputs->tokens");
    const Tensor target = read_tensor(communicator, outputs.tokens, "outputs->tokens");
    expect_carried(source);
    expect_dtype(target, {source.dtype});
    expect_shape(source, {*num_tokens_, kAnySize}, "[rows of topk_idx, hidden]");
    expect_shape(target, {kAnySize, kAnySize}, "[received rows, hidden]");
    expect_rows_of_granules(source);
    expect_rows_of_granules(target);
    expect_aligned(source);
    expect_aligned(target);
    memory.reads(source);
    memory.writes(target);
    const size_t row_bytes = shared_row_bytes(source, target);
    require(row_bytes <= config.max_token_bytes, ncclInvalidArgument,
            "outputs->tokens has rows of {} bytes, allowed: at most max_token_bytes ({})", row_bytes,
            config.max_token_bytes);
    args.row_bytes = static_cast<uint32_t>(row_bytes);
    const bool has_rows = source.num_elements() > 0 || target.num_elements() > 0;
    if (has_rows || config.has_several_teams()) {
        args.common.terms =
            args.common.terms.with_folded(Term::kRowUnits, row_bytes / kRowUnitBytes).with(Term::kDtype, source.dtype);
    }
    expect_rows(target, needs_all_rows);
    args.tokens = source.data;
    args.out_tokens = target.data;
    args.token_rows = target.num_elements() == 0 ? 0 : target.sizes[0];

    std::optional<Tensor> scales;
    std::optional<Tensor> out_scales;
    if (!with_scales) {
        expect_absent(inputs.scales, "inputs->scales", "with recipe none");
        expect_absent(outputs.scales, "outputs->scales", "with recipe none");
    } else {
        scales = read_tensor(communicator, inputs.scales, "inputs->scales");
        out_scales = read_tensor(communicator, outputs.scales, "outputs->scales");
        expect_dtype(*scales, {ncclFloat32, ncclFloat16, ncclBfloat16, ncclFloat8e4m3, ncclFloat8e5m2, ncclUint8});
        expect_dtype(*out_scales, {scales->dtype});
        expect_shape(*scales, {*num_tokens_, kAnySize}, "[rows of topk_idx, scales per token]");
        expect_shape(*out_scales, {target.sizes[0], kAnySize}, "[rows of outputs->tokens, scales per token]");
        expect_rows_of_granules(*scales);
        expect_rows_of_granules(*out_scales);
        expect_scales_aligned(*scales);
        expect_scales_aligned(*out_scales);
        const size_t scale_bytes = shared_row_bytes(*scales, *out_scales);
        require(scale_bytes <= config.max_token_bytes - row_bytes, ncclInvalidArgument,
                "outputs->tokens has rows of {} bytes and {} bytes of scales, allowed: together at most "
                "max_token_bytes ({})",
                row_bytes, scale_bytes, config.max_token_bytes);
        args.scale_bytes = static_cast<uint32_t>(scale_bytes);
        args.common.terms = args.common.terms.with_folded(Term::kScaleUnits, scale_bytes / kRowUnitBytes);
        require(target.window.has_value() == out_scales->window.has_value() || target.num_elements() == 0,
                ncclInvalidArgument,
                "outputs->tokens and outputs->scales: either both are window-backed or neither, here only {}",
                target.window ? "outputs->tokens" : "outputs->scales");
        memory.reads(*scales);
        memory.writes(*out_scales);
        args.scales = scales->data;
        args.out_scales = out_scales->data;
    }
    require(config.zero_copy != NCCL_EP_ZERO_COPY_ON || target.window || target.num_elements() == 0,
            ncclInvalidArgument, "the group's zero_copy is on: expected window-backed outputs->tokens");
    const auto are_in_windows = [&](const Tensor& rows, const std::optional<Tensor>& scales_of_rows) {
        return rows.window && (!with_scales || scales_of_rows->window);
    };
    if (!is_expert_major() && are_in_windows(target, out_scales)) {
        set_windows(args, target, out_scales);
    } else if (!config.has_several_teams() && are_in_windows(source, scales)) {
        HtCommon& c = args.common;
        set_windows(args, source, scales);
        c.windows_are_inputs = true;
        c.window_places += place_beside_arena(c, args.token_windows);
        if (scales) c.window_places += 3 * place_beside_arena(c, args.scale_windows);
        // More bits than the entered word has: where they differ, rows must not be read.
        c.window_offset = hash_of(c.window_places, 46) & ((uint64_t{1} << kPayloadBits) - 1);
    }
}

void HtHandle::read_dispatch_weights(const ncclEpDispatchInputs_t& inputs, const ncclEpDispatchOutputs_t& outputs,
                                     HtDispatchArgs& args, CallMemory& memory) {
    Communicator& communicator = group_->communicator();
    const Tensor weights = read_tensor(communicator, inputs.topk_weights, "inputs->topk_weights");
    expect_dtype(weights, {ncclFloat32});
    expect_shape(weights, {*num_tokens_, *num_tokens_ == 0 ? kAnySize : routed_topk_},
                 "[rows of topk_idx, the handle's top-k]");
    const Tensor out_weights = read_tensor(communicator, outputs.topk_weights, "outputs->topk_weights");
    expect_dtype(out_weights, {ncclFloat32});
    // With a budget, weights and ids have as many rows as that; a version 1 caller's tokens may have none.
    require(!is_eager() || (args.token_rows == 0) == (out_weights.num_elements() == 0), ncclInvalidArgument,
            "outputs->tokens has {} rows, outputs->topk_weights {} elements: either both are empty or neither",
            args.token_rows, out_weights.num_elements());
    if (is_expert_major()) {
        expect_absent(outputs.topk_idx, "outputs->topk_idx", "in expert-major layout");
        require(out_weights.ndim == 1, ncclInvalidArgument,
                "outputs->topk_weights has {} dimensions, expected 1 in expert-major layout: [rows]", out_weights.ndim);
    } else {
        const bool is_empty = out_weights.num_elements() == 0;
        expect_shape(out_weights, {kAnySize, is_empty ? kAnySize : routed_topk_}, "[rows, the handle's top-k]");
        const Tensor out_ids = read_tensor(communicator, outputs.topk_idx, "outputs->topk_idx");
        expect_dtype(out_ids, {ncclInt64});
        expect_shape(out_ids, {out_weights.sizes[0], is_empty ? kAnySize : routed_topk_},
                     "[rows of outputs->topk_weights, the handle's top-k]");
        memory.writes(out_ids);
        args.out_topk_idx = reinterpret_cast<int64_t*>(out_ids.data);
    }
    // Weights and ids have as many rows as the budget even for callers whose tokens may have fewer.
    expect_rows(out_weights, !is_eager());
    args.weight_rows = out_weights.num_elements() == 0 ? 0 : out_weights.sizes[0];
    memory.reads(weights);
    memory.writes(out_weights);
    args.topk_weights = reinterpret_cast<const float*>(weights.data);
    args.out_weights = reinterpret_cast<float*>(out_weights.data);
    args.with_weights = true;
}

}  // namespace crossdock
