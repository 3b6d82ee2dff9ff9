// SPDX-License-Identifier: Apache-2.0
// ncclEpDispatch in low-latency mode: checks the caller's structs and tensors against the contract, fills in the
// kernel's arguments, and launches.
#include <algorithm>

#include "core/enum_table.h"
#include "core/error.h"
#include "core/ll/handle.h"
#include "core/ll/plan.h"
#include "core/recipes.h"
#include "core/structs.h"

namespace crossdock {
namespace {

// API v1 asked for FP8 by passing scales, without a recipe.
bool asks_for_v1_fp8(const ncclEpDispatchConfig_t* config, const GroupConfig& group, bool is_expert_major,
                     const ncclEpDispatchOutputs_t& outputs) {
    return (config == nullptr || config->size < NCCL_EP_DISPATCH_CONFIG_V2_SIZE) && group.api_version == 1 &&
           is_expert_major && outputs.scales != nullptr;
}

static_assert(std::ranges::all_of(kDispatchRecipes,
                                  [](const DispatchRecipe& recipe) {
                                      return static_cast<uint64_t>(recipe.value) < kRoundedScales;
                                  }),
              "Term::kRecipe holds a recipe and, beside it, kRoundedScales");
static_assert(std::ranges::all_of(kDispatchRecipes,
                                  [](const DispatchRecipe& recipe) {
                                      const bool is_quantised = ll_wire_of(recipe.value) != LlDispatchWire::kBytes;
                                      return !recipe.in_ll || is_quantised == recipe.computes_scales();
                                  }),
              "kernels/ll/recipes.h knows the recipe");

void expect_no_scales(const ncclEpTensor_t* caller, const char* name, const DispatchRecipe& recipe) {
    if (caller != nullptr) expect_absent(caller, name, fmt::format("with recipe {}", recipe.label).c_str());
}

}  // namespace

void LlHandle::dispatch(const ncclEpDispatchInputs_t* caller_inputs, const ncclEpDispatchOutputs_t* caller_outputs,
                        const ncclEpLayoutInfo_t* layout_info, const ncclEpDispatchConfig_t* caller_config,
                        cudaStream_t stream) {
    group_->expect_working();
    const auto inputs = mandatory_struct(caller_inputs, NCCL_EP_DISPATCH_INPUTS_V1_SIZE, "inputs");
    const auto outputs = mandatory_struct(caller_outputs, NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE, "outputs");
    auto config = optional_struct(caller_config, NCCL_EP_DISPATCH_CONFIG_V1_SIZE, "config");
    expect_routing();
    const unsigned int direction = enum_bits(config.pass_direction);
    require(direction <= NCCL_EP_BWD_PASS, ncclInvalidArgument,
            "config->pass_direction is {}, allowed: 0 (forward), 1 (backward)", direction);
    require(direction == NCCL_EP_FWD_PASS, ncclInvalidUsage,
            "config->pass_direction is backward: LL groups run forward only");
    const bool is_v1_fp8 = asks_for_v1_fp8(caller_config, group_->config(), is_expert_major(), outputs);
    if (is_v1_fp8) config.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4;
    const DispatchRecipe& recipe =
        row_of_mode(kDispatchRecipes, enum_bits(config.quant_recipe), NCCL_EP_ALGO_LOW_LATENCY, "config->quant_recipe");
    expect_may_start(config.send_only != 0);

    LlDispatchArgs args{};
    args.common = common(OperationKind::kDispatch, config.send_only != 0);
    args.transposed_scales = is_v1_fp8;
    args.wire = ll_wire_of(recipe.value);
    args.round_scales = config.round_scales != 0;
    require(!recipe.forwards_scales || !args.round_scales, ncclInvalidArgument,
            "config->round_scales is {}, allowed with recipe {}: 0", config.round_scales, recipe.label);

    std::optional<PeerMap> token_window;
    std::optional<PeerMap> scale_window;
    CallMemory memory;
    WindowPlace token_place;
    WindowPlace scale_place;
    memory.reads(topk_idx());
    read_dispatch_tokens(inputs, outputs, recipe, args, token_window, token_place, memory);
    read_dispatch_scales(inputs, outputs, recipe, args, scale_window, scale_place, memory);
    read_dispatch_routing(inputs, outputs, layout_info, args, memory);
    memory.expect_apart();
    args.common.set(Term::kRecipe, recipe.value | (args.round_scales && recipe.computes_scales() ? kRoundedScales : 0));
    args.common.set_folded(Term::kRowUnits, args.row_bytes / kRowUnitBytes);
    // Ranks that agree on the bytes of a row have the same number of computed scales.
    if (!recipe.computes_scales()) args.common.set_folded(Term::kScaleUnits, args.scale_bytes / kRowUnitBytes);

    const bool may_be_direct = !is_expert_major() && !recipe.computes_scales();
    if (may_be_direct && token_window) args.direct |= kDirectTokens, args.token_windows = *token_window;
    if (may_be_direct && scale_window) args.direct |= kDirectScales, args.scale_windows = *scale_window;
    require(group_->config().zero_copy != NCCL_EP_ZERO_COPY_ON || args.direct != 0, ncclInvalidArgument,
            "the group's zero_copy is on: expected window-backed outputs->tokens or outputs->scales, rank-major layout "
            "and recipe none or forward");
    args.common.set(Term::kRouting, window_term(args.direct, token_place, scale_place));
    const LaunchShape shape = plan_ll_dispatch(*group_, args, num_sms_);
    issue<LlDispatch>(args, shape, stream);
    dispatched_ = routing_;
    published_ = overlap_;
    elastic_.reset();
    is_rebound_ = false;
}

void LlHandle::read_dispatch_tokens(const ncclEpDispatchInputs_t& inputs, const ncclEpDispatchOutputs_t& outputs,
                                    const DispatchRecipe& recipe, LlDispatchArgs& args,
                                    std::optional<PeerMap>& token_window, WindowPlace& token_place,
                                    CallMemory& memory) const {
    const GroupConfig& config = group_->config();
    const Tensor source = read_tensor(group_->communicator(), inputs.tokens, "inputs->tokens");
    const Tensor target = read_tensor(group_->communicator(), outputs.tokens, "outputs->tokens");
    if (recipe.computes_scales()) {
        expect_dtype(source, {recipe.token_type});
    } else {
        expect_carried(source);
    }
    expect_dtype(target, {recipe.computes_scales() ? recipe.received_type : source.dtype});

    const size_t slots = size_t{config.num_ranks} * config.max_tokens;
    if (is_expert_major()) {
        expect_shape(target, {config.experts_per_rank(), slots, kAnySize},
                     "[experts per rank, ranks * max_dispatch_tokens_per_rank, hidden]");
    } else {
        expect_shape(target, {config.num_ranks, config.max_tokens, kAnySize},
                     "[ranks, max_dispatch_tokens_per_rank, hidden]");
    }
    const size_t hidden = target.sizes[2];
    expect_shape(source, {routing_.num_tokens, routing_.num_tokens == 0 ? kAnySize : hidden},
                 "[rows of topk_idx, hidden of outputs->tokens]");
    const uint64_t source_row = hidden * dtype_size(source.dtype);
    require(hidden > 0 && target.row_bytes() % kRowGranule == 0 && source_row % kRowGranule == 0, ncclInvalidArgument,
            "outputs->tokens has rows of {} bytes, allowed: positive multiples of {}", target.row_bytes(), kRowGranule);
    require(!recipe.computes_scales() || hidden % recipe.scale_block == 0, ncclInvalidArgument,
            "inputs->tokens has rows of {} elements, allowed with {}: multiples of {}", hidden, recipe.label,
            recipe.scale_block);
    require(target.row_bytes() <= config.max_token_bytes, ncclInvalidArgument,
            "outputs->tokens has rows of {} bytes, allowed: at most max_token_bytes ({})", target.row_bytes(),
            config.max_token_bytes);
    expect_aligned(source);
    expect_aligned(target);
    memory.reads(source);
    memory.writes(target);
    args.tokens = source.data;
    args.source_row_bytes = static_cast<uint32_t>(source_row);
    args.out_tokens = target.data;
    args.row_bytes = static_cast<uint32_t>(target.row_bytes());
    args.common.set(Term::kDtype, source.dtype);
    token_window = target.window;
    token_place = target.window_place;
}

void LlHandle::read_dispatch_scales(const ncclEpDispatchInputs_t& inputs, const ncclEpDispatchOutputs_t& outputs,
                                    const DispatchRecipe& recipe, LlDispatchArgs& args,
                                    std::optional<PeerMap>& scale_window, WindowPlace& scale_place,
                                    CallMemory& memory) const {
    const GroupConfig& config = group_->config();
    if (!recipe.forwards_scales) expect_no_scales(inputs.scales, "inputs->scales", recipe);
    if (!recipe.forwards_scales && !recipe.computes_scales())
        return expect_no_scales(outputs.scales, "outputs->scales", recipe);
    const Tensor target = read_tensor(group_->communicator(), outputs.scales, "outputs->scales");
    const size_t slots = size_t{config.num_ranks} * config.max_tokens;
    const size_t first = is_expert_major() ? config.experts_per_rank() : config.num_ranks;
    const size_t second = is_expert_major() ? slots : config.max_tokens;
    if (recipe.computes_scales()) {
        expect_dtype(target, {recipe.scale_type});
        const size_t hidden = args.row_bytes / dtype_size(recipe.received_type);
        expect_shape(target, {first, second, hidden / recipe.scale_block}, "[as outputs->tokens, blocks of hidden]");
    } else {
        const Tensor source = read_tensor(group_->communicator(), inputs.scales, "inputs->scales");
        expect_dtype(source, {ncclFloat32, ncclFloat16, ncclBfloat16, ncclFloat8e4m3, ncclFloat8e5m2, ncclUint8});
        expect_dtype(target, {source.dtype});
        expect_shape(target, {first, second, kAnySize}, "[as outputs->tokens, scales per token]");
        expect_shape(source, {routing_.num_tokens, routing_.num_tokens == 0 ? kAnySize : target.sizes[2]},
                     "[rows of topk_idx, scales per token of outputs->scales]");
        require(target.row_bytes() > 0 && target.row_bytes() % kRowGranule == 0, ncclInvalidArgument,
                "outputs->scales has rows of {} bytes, allowed: positive multiples of {}", target.row_bytes(),
                kRowGranule);
        memory.reads(source);
        args.scales = source.data;
        expect_scales_aligned(source);
        expect_scales_aligned(target);
        scale_window = target.window;
        scale_place = target.window_place;
    }
    memory.writes(target);
    require(
        args.row_bytes + target.row_bytes() <= config.max_token_bytes, ncclInvalidArgument,
        "outputs->tokens has rows of {} bytes and {} bytes of scales, allowed: together at most max_token_bytes ({})",
        args.row_bytes, target.row_bytes(), config.max_token_bytes);
    args.out_scales = target.data;
    args.scale_bytes = static_cast<uint32_t>(target.row_bytes());
}

void LlHandle::read_dispatch_routing(const ncclEpDispatchInputs_t& inputs, const ncclEpDispatchOutputs_t& outputs,
                                     const ncclEpLayoutInfo_t* caller_info, LlDispatchArgs& args,
                                     CallMemory& memory) const {
    const GroupConfig& config = group_->config();
    Communicator& communicator = group_->communicator();
    const auto info = optional_struct(caller_info, NCCL_EP_LAYOUT_INFO_V1_SIZE, "layout_info");
    if (is_expert_major()) {
        expect_absent(inputs.topk_weights, "inputs->topk_weights", "in expert-major layout");
        expect_absent(outputs.topk_weights, "outputs->topk_weights", "in expert-major layout");
        expect_absent(outputs.topk_idx, "outputs->topk_idx", "in expert-major layout");
        expect_absent(info.src_rank_counters, "layout_info->src_rank_counters", "in expert-major layout");
        const Tensor counters = read_counter(communicator, info.expert_counters, "layout_info->expert_counters",
                                             config.experts_per_rank(), false);
        memory.writes(counters);
        args.counters = reinterpret_cast<int32_t*>(counters.data);
        read_dispatch_places(info, args, memory);
        return;
    }
    expect_absent(info.expert_counters, "layout_info->expert_counters", "in rank-major layout");
    read_dispatch_places(info, args, memory);
    const unsigned int id_kind = enum_bits(info.recv_topk_idx_kind);
    require(id_kind <= NCCL_EP_EXPERT_ID_GLOBAL, ncclInvalidArgument,
            "layout_info->recv_topk_idx_kind is {}, allowed: 0 (auto), 1 (local), 2 (global)", id_kind);
    args.global_ids = id_kind == NCCL_EP_EXPERT_ID_GLOBAL;
    if (info.src_rank_counters != nullptr) {
        const Tensor counters = read_counter(communicator, info.src_rank_counters, "layout_info->src_rank_counters",
                                             config.num_ranks, false);
        memory.writes(counters);
        args.counters = reinterpret_cast<int32_t*>(counters.data);
    }
    const Tensor weights = read_tensor(communicator, inputs.topk_weights, "inputs->topk_weights");
    expect_dtype(weights, {ncclFloat32});
    expect_shape(weights, {routing_.num_tokens, topk_}, "[rows of topk_idx, the handle's top-k]");
    const Tensor out_weights = read_tensor(communicator, outputs.topk_weights, "outputs->topk_weights");
    expect_dtype(out_weights, {ncclFloat32});
    expect_shape(out_weights, {config.num_ranks, config.max_tokens, topk_},
                 "[ranks, max_dispatch_tokens_per_rank, the handle's top-k]");
    const Tensor out_ids = read_tensor(communicator, outputs.topk_idx, "outputs->topk_idx");
    expect_dtype(out_ids, {ncclInt32});
    expect_shape(out_ids, {config.num_ranks, config.max_tokens, topk_},
                 "[ranks, max_dispatch_tokens_per_rank, the handle's top-k]");
    memory.reads(weights);
    memory.writes(out_weights);
    memory.writes(out_ids);
    args.topk_weights = reinterpret_cast<const float*>(weights.data);
    args.out_weights = reinterpret_cast<float*>(out_weights.data);
    args.out_topk_idx = reinterpret_cast<int32_t*>(out_ids.data);
}

// Numbers that are constant here or sums of others: engines that use both modes request them in LL, too.
void LlHandle::read_dispatch_places(const ncclEpLayoutInfo_t& info, LlDispatchArgs& args, CallMemory& memory) const {
    const auto read = [&](const ncclEpTensor_t* caller, const char* name, size_t extent, bool& is_64_bit) -> void* {
        if (caller == nullptr) return nullptr;
        const Tensor tensor = read_counter(group_->communicator(), caller, name, extent, true);
        memory.writes(tensor);
        is_64_bit = tensor.dtype == ncclInt64;
        return tensor.data;
    };
    if (is_expert_major()) {
        args.offsets = read(info.expert_offsets, "layout_info->expert_offsets", group_->config().experts_per_rank(),
                            args.offsets_are_64_bit);
    }
    args.total = read(info.recv_total_counter, "layout_info->recv_total_counter", 1, args.total_is_64_bit);
    args.tells_places = args.offsets != nullptr || args.total != nullptr;
}

}  // namespace crossdock
