// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "fuzz/session.h"

namespace crossdock::fuzz {

void Session::choose_ht_config(ncclEpGroupConfig_t& config) {
    config.algorithm = NCCL_EP_ALGO_HIGH_THROUGHPUT;
    const uint32_t least = config.max_dispatch_tokens_per_rank;
    switch (input_.below(3)) {
        case 0:
            config.max_recv_tokens_per_rank = input_.or_edge(0);
            config.num_topk = input_.or_edge(std::min(config.num_experts, 4u));
            break;
        case 1:
            config.max_recv_tokens_per_rank = input_.or_edge(least + input_.below(48));
            config.overflow_policy = NCCL_EP_OVERFLOW_DROP;
            break;
        default:
            config.max_recv_tokens_per_rank = input_.or_edge(least % 64 * 16);
    }
}

size_t Session::num_rows(const Handle& handle) const {
    if (handle.group.budget != 0) {
        return handle.group.budget;
    }
    const size_t experts = handle.group.num_experts / static_cast<size_t>(num_ranks_);
    return static_cast<size_t>(num_ranks_) * handle.group.max_tokens * handle.topk + experts * handle.alignment;
}

// What an update, or an expert-major dispatch, tells of the routing.
void Session::fill_numbers(const Handle& handle, ncclEpLayoutInfo_t& layout_info) {
    if (!handle.group.is_ht) {
        return;
    }
    const size_t experts = handle.group.num_experts / static_cast<size_t>(num_ranks_);
    const bool is_flat = handle.layout == NCCL_EP_LAYOUT_FLAT;
    const ncclDataType_t dtype = input_.below(2) == 0 ? ncclInt32 : ncclInt64;
    layout_info.expert_counters = tensor_if(input_.below(4) != 0, is_flat ? ncclInt32 : dtype, {experts});
    layout_info.expert_offsets = tensor_if(input_.below(4) != 0, dtype, {experts + input_.below(2)});
    layout_info.recv_total_counter = tensor_if(input_.below(4) != 0, dtype, {1});
}

void Session::dispatch_ht(Handle& handle) {
    const bool is_flat = handle.layout == NCCL_EP_LAYOUT_FLAT;
    const bool is_backward = input_.below(3) == 0;
    const bool has_scales = input_.below(4) == 0;
    static constexpr uint32_t kHidden[] = {16, 8, 32, 128, 256, 512, 7, 24};
    static constexpr ncclDataType_t kTypes[] = {ncclBfloat16, ncclFloat16, ncclFloat32, ncclUint8};
    const ncclDataType_t dtype = has_scales ? ncclFloat8e4m3 : kTypes[input_.below(4)];
    handle.hidden = kHidden[input_.below(8)];
    const size_t rows = num_rows(handle);

    Padded<ncclEpDispatchInputs_t> inputs;
    Padded<ncclEpDispatchOutputs_t> outputs;
    Padded<ncclEpLayoutInfo_t> layout_info;
    Padded<ncclEpDispatchConfig_t> config;
    inputs.whole.tokens = tensor(dtype, {handle.num_tokens, handle.hidden});
    inputs.whole.topk_weights = tensor_if(!is_backward, ncclFloat32, {handle.num_tokens, handle.topk});
    inputs.whole.scales = tensor_if(has_scales, ncclFloat32, {handle.num_tokens, 4});
    rows_are_fixed_ = num_ranks_ > 1;
    outputs.whole.tokens = tensor(dtype, {rows, handle.hidden});
    outputs.whole.topk_weights = is_flat ? tensor_if(!is_backward, ncclFloat32, {rows, handle.topk})
                                         : tensor_if(!is_backward, ncclFloat32, {rows});
    outputs.whole.topk_idx = tensor_if(!is_backward && is_flat, ncclInt64, {rows, handle.topk});
    outputs.whole.scales = tensor_if(has_scales, ncclFloat32, {rows, 4});
    rows_are_fixed_ = false;
    if (input_.below(3) == 0) {
        fill_numbers(handle, layout_info.whole);
    }
    layout_info.whole.recv_topk_idx_kind = static_cast<ncclEpExpertIdKind_t>(input_.or_edge(input_.below(3)));
    config.whole.send_only = input_.below(2);
    config.whole.round_scales = input_.or_edge(0);
    config.whole.pass_direction = static_cast<ncclEpPassDir_t>(input_.or_edge(is_backward ? 1 : 0));
    config.whole.quant_recipe = static_cast<ncclEpDispQuant_t>(input_.or_edge(has_scales ? 1 : 0));
    expect(ncclEpDispatch(handle.handle, break_struct(inputs), break_struct(outputs),
                          input_.below(2) == 0 ? nullptr : break_struct(layout_info), break_struct(config), nullptr),
           "ncclEpDispatch");
}

void Session::combine_ht(const Handle& handle) {
    const bool is_flat = handle.layout == NCCL_EP_LAYOUT_FLAT;
    const bool is_backward = input_.below(3) == 0;
    static constexpr ncclDataType_t kTypes[] = {ncclBfloat16, ncclFloat16, ncclFloat32, ncclBfloat16};
    const uint8_t choice = input_.byte();
    const uint32_t kind = choice % 4;
    const CombineRecipe recipe = fitting_row(kCombineRecipes, choice / 4, [=](const CombineRecipe& each) {
        return kind == 3 && each.in_ht && each.quantises() && !(is_flat && each.needs_expert_major);
    });
    const ncclDataType_t dtype = kTypes[kind];
    const size_t hidden = input_.byte() < 200 ? handle.hidden : recipe.quantises() ? 3 * recipe.row_multiple : 16;
    const size_t rows = num_rows(handle);

    Padded<ncclEpCombineInputs_t> inputs;
    Padded<ncclEpCombineOutputs_t> outputs;
    Padded<ncclEpCombineConfig_t> config;
    rows_are_fixed_ = num_ranks_ > 1;
    inputs.whole.tokens = tensor(dtype, {rows, hidden});
    inputs.whole.topk_weights = is_flat ? tensor_if(is_backward, ncclFloat32, {rows, handle.topk})
                                        : tensor_if(is_backward, ncclFloat32, {rows});
    rows_are_fixed_ = false;
    inputs.whole.scales = tensor_if(false, ncclFloat32, {rows, 1});
    outputs.whole.tokens = tensor(dtype, {handle.num_tokens, hidden});
    outputs.whole.topk_weights = tensor_if(is_backward, ncclFloat32, {handle.num_tokens, handle.topk});
    config.whole.send_only = input_.below(2);
    config.whole.pass_direction = static_cast<ncclEpPassDir_t>(input_.or_edge(is_backward ? 1 : 0));
    config.whole.quant_recipe = static_cast<ncclEpCombQuant_t>(input_.or_edge(recipe.value));
    expect(ncclEpCombine(handle.handle, break_struct(inputs), break_struct(outputs), break_struct(config), nullptr),
           "ncclEpCombine");
}

}  // namespace crossdock::fuzz
