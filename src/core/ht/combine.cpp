// SPDX-License-Identifier: Apache-2.0
// ncclEpCombine in high-throughput mode: checks the caller's structs and tensors against the contract and fills in the
// kernel's arguments.
#include <algorithm>

#include "core/device_support.h"
#include "core/enum_table.h"
#include "core/error.h"
#include "core/ht/handle.h"
#include "core/ht/plan.h"
#include "core/recipes.h"
#include "core/structs.h"
#include "kernels/ht/launch.h"

namespace crossdock {

static_assert(std::ranges::all_of(kCombineRecipes,
                                  [](const CombineRecipe& recipe) {
                                      const bool is_quantised = ht_wire_of(recipe.value) != HtWire::kRows;
                                      const bool fits =
                                          static_cast<uint64_t>(recipe.value) < 1u << HtAgreed::kRecipeBits;
                                      return !recipe.in_ht || (is_quantised == recipe.quantises() && fits);
                                  }),
              "kernels/ht/recipes.h knows the recipe, and its part of Term::kRecipe holds it");

void HtHandle::combine(const ncclEpCombineInputs_t* caller_inputs, const ncclEpCombineOutputs_t* caller_outputs,
                       const ncclEpCombineConfig_t* caller_config, cudaStream_t stream) {
    group_->expect_working();
    const auto settings = optional_struct(caller_config, NCCL_EP_COMBINE_CONFIG_V1_SIZE, "config");
    const unsigned int recipe_bits = enum_bits(settings.quant_recipe);
    expect_supported_combine(recipe_bits, group_->runtime().compute_capability());
    const auto inputs = mandatory_struct(caller_inputs, NCCL_EP_COMBINE_INPUTS_V1_SIZE, "inputs");
    const auto outputs = mandatory_struct(caller_outputs, NCCL_EP_COMBINE_OUTPUTS_V1_SIZE, "outputs");
    const unsigned int direction = enum_bits(settings.pass_direction);
    require(direction <= NCCL_EP_BWD_PASS, ncclInvalidArgument,
            "config->pass_direction is {}, allowed: 0 (forward), 1 (backward)", direction);
    const CombineRecipe& recipe =
        row_of_mode(kCombineRecipes, recipe_bits, NCCL_EP_ALGO_HIGH_THROUGHPUT, "config->quant_recipe");
    require(!recipe.needs_expert_major || is_expert_major(), ncclInvalidArgument,
            "config->quant_recipe is {}, allowed in expert-major layout: this handle's is flat", recipe.label);
    require(!recipe.needs_one_team || !group_->config().has_several_teams(), ncclInvalidUsage,
            "config->quant_recipe is {}, allowed where all ranks are in one LSA team: there are {} ranks in "
            "teams of {}",
            recipe.label, group_->config().num_ranks, group_->config().lsa_team_size);
    group_->config().expect_rows_to_sum(is_expert_major());
    require(!group_->config().invariant || !recipe.quantises(), ncclInvalidUsage,
            "config->quant_recipe is {}, which rounds the sums of ranks: an invariant group combines rows as they are",
            recipe.label);
    const bool is_backward = direction == NCCL_EP_BWD_PASS;
    DeviceScope device(group_->runtime());
    expect_routing(stream, outputs.tokens, "outputs->tokens");

    const GroupConfig& config = group_->config();
    Communicator& communicator = group_->communicator();
    const Tensor tokens = read_tensor(communicator, inputs.tokens, "inputs->tokens");
    const Tensor target = read_tensor(communicator, outputs.tokens, "outputs->tokens");
    if (recipe.quantises()) {
        expect_dtype(tokens, {ncclBfloat16});
    } else {
        expect_dtype(tokens, {ncclBfloat16, ncclFloat16, ncclFloat32});
    }
    expect_dtype(target, {tokens.dtype});
    expect_shape(tokens, {kAnySize, kAnySize}, "[received rows, hidden]");
    expect_shape(target, {*num_tokens_, kAnySize}, "[rows of topk_idx, hidden]");
    const Tensor& wide = target.num_elements() > 0 ? target : tokens;
    for (const Tensor* tensor : {&tokens, &target}) {
        if (tensor->sizes[0] == 0) continue;
        require(tensor->sizes[1] == wide.sizes[1], ncclInvalidArgument, "{}: dimension 1 is {}, expected as {}: {}",
                tensor->name, tensor->sizes[1], wide.name, wide.sizes[1]);
        require(tensor->row_bytes() > 0 && tensor->row_bytes() % 16 == 0, ncclInvalidArgument,
                "{} has rows of {} bytes, allowed: positive multiples of 16", tensor->name, tensor->row_bytes());
        require(tensor->row_bytes() <= config.max_token_bytes, ncclInvalidArgument,
                "{} has rows of {} bytes, allowed: at most max_token_bytes ({})", tensor->name, tensor->row_bytes(),
                config.max_token_bytes);
        require(tensor->sizes[1] % recipe.row_multiple == 0, ncclInvalidArgument,
                "{} has rows of {} elements, allowed with {}: multiples of {}", tensor->name, tensor->sizes[1],
                recipe.label, recipe.row_multiple);
        expect_aligned(*tensor);
    }
    CallMemory memory;
    memory.reads(tokens);
    memory.writes(target);
    expect_absent(inputs.scales, "inputs->scales", "in HT mode");
    require(config.zero_copy != NCCL_EP_ZERO_COPY_ON || tokens.window || tokens.num_elements() == 0,
            ncclInvalidArgument, "the group's zero_copy is on: expected window-backed inputs->tokens");
    learn_total(false);
    if (total_) expect_rows(tokens, false);

    HtCombineArgs args{};
    args.wire = config.invariant ? HtWire::kChoices : ht_wire_of(recipe.value);
    args.common = common(OperationKind::kCombine, combine_blocks(args.wire));
    args.dtype = kernel_dtype(tokens.dtype);
    args.tokens = tokens.data;
    args.token_rows = tokens.num_elements() == 0 ? 0 : tokens.sizes[0];
    args.row_bytes = static_cast<uint32_t>(wide.row_bytes());
    args.out_tokens = target.data;
    if (is_backward) {
        const Tensor weights = read_tensor(communicator, inputs.topk_weights, "inputs->topk_weights");
        expect_dtype(weights, {ncclFloat32});
        const bool is_empty = weights.num_elements() == 0;
        require((args.token_rows == 0) == is_empty, ncclInvalidArgument,
                "inputs->tokens has {} rows, inputs->topk_weights {} elements: either both are empty or neither",
                args.token_rows, weights.num_elements());
        if (is_expert_major()) {
            expect_shape(weights, {is_empty ? kAnySize : tokens.sizes[0]}, "[rows of inputs->tokens]");
        } else {
            expect_shape(weights, {is_empty ? kAnySize : tokens.sizes[0], is_empty ? kAnySize : routed_topk_},
                         "[rows of inputs->tokens, the handle's top-k]");
        }
        const Tensor out_weights = read_tensor(communicator, outputs.topk_weights, "outputs->topk_weights");
        expect_dtype(out_weights, {ncclFloat32});
        expect_shape(out_weights, {*num_tokens_, *num_tokens_ == 0 ? kAnySize : routed_topk_},
                     "[rows of topk_idx, the handle's top-k]");
        memory.reads(weights);
        memory.writes(out_weights);
        args.weights = reinterpret_cast<const float*>(weights.data);
        args.out_weights = reinterpret_cast<float*>(out_weights.data);
        args.with_weights = true;
    } else {
        expect_absent(inputs.topk_weights, "inputs->topk_weights", "in a forward pass");
    }
    memory.expect_apart();
    // Expert-major rows are summed before they are sent; of rows of choices, source ranks do not know the slots.
    args.common.has_windows = !is_expert_major() && tokens.window.has_value();
    if (args.common.has_windows) {
        args.token_windows = *tokens.window;
        args.common.window_offset = folded_window_offset(tokens.window_place.offset);
        args.common.window_places = tokens.window_place.hash();
        args.common.window_rows = args.row_bytes == 0 ? 0 : tokens.window_bytes / args.row_bytes;
    }
    Terms& terms = args.common.terms;
    terms = terms.with(Term::kDirection, direction).with(Term::kRecipe, recipe.value);
    // A rank without rows may not know their size, except that between teams it forwards those of others.
    if (wide.num_elements() > 0 || config.has_several_teams())
        terms = terms.with_folded(Term::kRowUnits, args.row_bytes / kRowUnitBytes).with(Term::kDtype, tokens.dtype);
    add_agreed(args.common);
    const LaunchShape shape = plan_ht_combine(*group_, args);
    before_operation(stream);
    launch<HtCombine>(group_->runtime(), args, shape, stream);
    group_->after_operation(stream);
}

}  // namespace crossdock
