// SPDX-License-Identifier: Apache-2.0
// ncclEpCombine in low-latency mode: checks the caller's structs and tensors against the contract, fills in the
// kernel's arguments, and launches.
#include <algorithm>

#include "core/device_support.h"
#include "core/enum_table.h"
#include "core/error.h"
#include "core/ll/handle.h"
#include "core/ll/plan.h"
#include "core/recipes.h"
#include "core/structs.h"

namespace crossdock {

static_assert(std::ranges::all_of(kCombineRecipes,
                                  [](const CombineRecipe& recipe) {
                                      return static_cast<uint64_t>(recipe.value) < kRoundedScales &&
                                             (!recipe.in_ll ||
                                              is_quantised(ll_wire_of(recipe.value)) == recipe.quantises());
                                  }),
              "kernels/ll/recipes.h knows the recipe, and Term::kRecipe holds it");

void LlHandle::combine(const ncclEpCombineInputs_t* caller_inputs, const ncclEpCombineOutputs_t* caller_outputs,
                       const ncclEpCombineConfig_t* caller_config, cudaStream_t stream) {
    group_->expect_working();
    const auto settings = optional_struct(caller_config, NCCL_EP_COMBINE_CONFIG_V1_SIZE, "config");
    expect_supported_combine(enum_bits(settings.quant_recipe), group_->runtime().compute_capability());
    const CombineRecipe& recipe = row_of_mode(kCombineRecipes, enum_bits(settings.quant_recipe),
                                              NCCL_EP_ALGO_LOW_LATENCY, "config->quant_recipe");
    const auto inputs = mandatory_struct(caller_inputs, NCCL_EP_COMBINE_INPUTS_V1_SIZE, "inputs");
    const auto outputs = mandatory_struct(caller_outputs, NCCL_EP_COMBINE_OUTPUTS_V1_SIZE, "outputs");
    expect_routing();
    expect_dispatched_routing();
    expect_published();
    const unsigned int direction = enum_bits(settings.pass_direction);
    require(direction <= NCCL_EP_BWD_PASS, ncclInvalidArgument,
            "config->pass_direction is {}, allowed: 0 (forward), 1 (backward)", direction);
    require(direction == NCCL_EP_FWD_PASS, ncclInvalidUsage,
            "config->pass_direction is backward: LL groups run forward only");
    group_->config().expect_rows_to_sum(is_expert_major());
    expect_may_start(settings.send_only != 0);

    const GroupConfig& config = group_->config();
    Communicator& communicator = group_->communicator();
    const Tensor tokens = read_tensor(communicator, inputs.tokens, "inputs->tokens");
    const Tensor target = read_tensor(communicator, outputs.tokens, "outputs->tokens");
    expect_dtype(tokens, {ncclBfloat16, ncclFloat16, ncclFloat32});
    expect_dtype(target, {tokens.dtype});
    if (is_expert_major()) {
        expect_shape(tokens, {config.experts_per_rank(), size_t{config.num_ranks} * config.max_tokens, kAnySize},
                     "[experts per rank, ranks * max_dispatch_tokens_per_rank, hidden]");
    } else {
        expect_shape(tokens, {config.num_ranks, config.max_tokens, kAnySize},
                     "[ranks, max_dispatch_tokens_per_rank, hidden]");
    }
    expect_shape(target, {routing_.num_tokens, routing_.num_tokens == 0 ? kAnySize : tokens.sizes[2]},
                 "[rows of topk_idx, hidden of inputs->tokens]");
    require(tokens.row_bytes() > 0 && tokens.row_bytes() % 16 == 0, ncclInvalidArgument,
            "inputs->tokens has rows of {} bytes, allowed: positive multiples of 16", tokens.row_bytes());
    require(tokens.row_bytes() <= config.max_token_bytes, ncclInvalidArgument,
            "inputs->tokens has rows of {} bytes, allowed: at most max_token_bytes ({})", tokens.row_bytes(),
            config.max_token_bytes);
    for (const Tensor* tensor : {&tokens, &target}) {
        expect_aligned(*tensor);
    }
    CallMemory memory;
    memory.reads(topk_idx());
    memory.reads(tokens);
    memory.writes(target);

    LlCombineArgs args{};
    args.common = common(OperationKind::kCombine, settings.send_only != 0);
    args.dtype = kernel_dtype(tokens.dtype);
    args.tokens = tokens.data;
    args.row_bytes = static_cast<uint32_t>(tokens.row_bytes());
    args.wire_bytes = args.row_bytes;
    args.wire = sums_ == CROSSDOCK_SUMS_SENDER ? LlCombineWire::kSums : LlCombineWire::kRows;
    args.out_tokens = target.data;
    args.leaves_out = is_rebound_;
    read_combine_recipe(inputs, recipe, tokens, args, memory);
    if (is_expert_major()) {
        const Tensor weights = read_tensor(communicator, outputs.topk_weights, "outputs->topk_weights");
        expect_dtype(weights, {ncclFloat32});
        expect_shape(weights, {routing_.num_tokens, topk_}, "[rows of topk_idx, the handle's top-k]");
        args.topk_weights = reinterpret_cast<const float*>(weights.data);
        memory.reads(weights);
    }
    memory.expect_apart();
    args.common.set(Term::kRecipe, recipe.value);
    args.common.set_folded(Term::kRowUnits, args.row_bytes / kRowUnitBytes);
    args.common.set(Term::kDtype, tokens.dtype);
    args.common.set(Term::kSums, args.wire == LlCombineWire::kSums ? CROSSDOCK_SUMS_SENDER : CROSSDOCK_SUMS_EXACT);
    const LaunchShape shape = plan_ll_combine(*group_, args, num_sms_);
    group_->note_combine_warps(shape.warps_per_block);
    issue<LlCombine>(args, shape, stream);
}

void LlHandle::read_combine_recipe(const ncclEpCombineInputs_t& inputs, const CombineRecipe& recipe,
                                   const Tensor& tokens, LlCombineArgs& args, CallMemory& memory) const {
    if (!recipe.takes_row_scales && inputs.scales != nullptr)
        expect_absent(inputs.scales, "inputs->scales", fmt::format("with recipe {}", recipe.label).c_str());
    if (!recipe.quantises()) return;
    expect_dtype(tokens, {ncclBfloat16});
    require(tokens.sizes[2] % recipe.row_multiple == 0, ncclInvalidArgument,
            "inputs->tokens has rows of {} elements, allowed with {}: multiples of {}", tokens.sizes[2], recipe.label,
            recipe.row_multiple);
    args.wire = ll_wire_of(recipe.value);
    args.wire_bytes = quantised_row_bytes(args.wire, static_cast<uint32_t>(tokens.sizes[2]));
    if (!recipe.takes_row_scales) return;
    const Tensor scales = read_tensor(group_->communicator(), inputs.scales, "inputs->scales");
    expect_dtype(scales, {ncclFloat32});
    expect_shape(scales, {tokens.sizes[0], tokens.sizes[1], 1}, "[as inputs->tokens, 1]");
    memory.reads(scales);
    args.row_scales = reinterpret_cast<const float*>(scales.data);
}

}  // namespace crossdock
