// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "fuzz/session.h"

namespace crossdock::fuzz {
namespace {

constexpr uint32_t kMostAlignment = 8;

// Dense, or columns one behind the other: as many elements either way.
void choose_strides(Input& input, int64_t (&strides)[2], size_t rows) {
    if (input.below(2) == 0) {
        return;
    }
    strides[0] = input.rarely() ? -1 : 1;
    strides[1] = static_cast<int64_t>(rows);
}

}  // namespace

void Session::elastic_dispatch() {
    const Handle chosen = *choose_handle();
    const bool by_expert = chosen.layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;
    const size_t ranks = static_cast<size_t>(num_ranks_);
    const size_t experts = chosen.group.num_experts / ranks;
    const size_t rows = num_rows(chosen) + (by_expert ? experts * kMostAlignment : 0);
    const size_t topk = chosen.topk;
    static constexpr uint32_t kHidden[] = {16, 8, 32, 128, 256, 512, 7, 24};
    static constexpr ncclDataType_t kTypes[] = {ncclBfloat16, ncclFloat16, ncclFloat32, ncclUint8};
    const ncclDataType_t dtype = kTypes[input_.below(4)];
    const size_t hidden = kHidden[input_.below(8)];
    const size_t scales = input_.below(4);
    const bool has_weights = input_.below(2) == 0;

    Padded<crossdockElasticDispatch_t> call;
    crossdockElasticDispatch_t& whole = call.whole;
    whole.tokens = tensor(dtype, {chosen.num_tokens, hidden});
    whole.scales = tensor_if(scales > 0, ncclInt32, {chosen.num_tokens, scales});
    choose_strides(input_, whole.scale_strides, chosen.num_tokens);
    whole.topk_weights = tensor_if(has_weights, ncclFloat32, {chosen.num_tokens, topk});
    whole.alignment = input_.or_edge(chosen.group.is_ht ? chosen.alignment : input_.below(kMostAlignment + 1));
    whole.origin_stride = input_.or_edge(chosen.group.max_tokens);
    whole.zero_padding = static_cast<int>(input_.or_edge(by_expert ? input_.below(2) : 0));
    // With too few rows the group fails when they have been written.
    rows_are_fixed_ = true;
    whole.out_tokens = tensor(dtype, {rows, hidden});
    whole.out_scales = tensor_if(scales > 0, ncclInt32, {rows, scales});
    choose_strides(input_, whole.out_scale_strides, rows);
    whole.out_topk_idx =
        tensor_if(!by_expert && input_.below(2) == 0, input_.below(2) == 0 ? ncclInt32 : ncclInt64, {rows, topk});
    whole.out_topk_weights =
        by_expert ? tensor_if(has_weights, ncclFloat32, {rows}) : tensor_if(has_weights, ncclFloat32, {rows, topk});
    whole.sources = tensor_if(input_.below(2) == 0, ncclInt32, {ranks * chosen.group.max_tokens, topk + 2});
    rows_are_fixed_ = false;
    whole.rank_ends = tensor_if(input_.below(2) == 0, ncclInt32, {ranks});
    whole.expert_counts = tensor_if(input_.below(2) == 0, ncclInt32, {experts});
    whole.expert_ends = tensor_if(input_.below(2) == 0, ncclInt32, {experts});
    whole.statistics = tensor_if(input_.below(2) == 0, ncclInt32, {experts});
    whole.own_weights_only = static_cast<int>(input_.or_edge(by_expert ? 0 : input_.below(2)));
    // Later operations read it, so it may not lie where another tensor of theirs may.
    const bool window_was_used = std::exchange(window_is_used_, true);
    whole.topk_idx_copy = tensor_if(!chosen.group.is_ht && input_.below(2) == 0,
                                    input_.below(2) == 0 ? ncclInt32 : ncclInt64, {chosen.num_tokens, topk});
    window_is_used_ = window_was_used;
    expect(crossdockElasticDispatch(chosen.handle, break_struct(call), nullptr), "crossdockElasticDispatch");
}

void Session::elastic_combine() {
    const Handle chosen = *choose_handle();
    const bool by_expert = chosen.layout == NCCL_EP_LAYOUT_EXPERT_MAJOR;
    const size_t experts = chosen.group.num_experts / static_cast<size_t>(num_ranks_);
    const size_t rows = num_rows(chosen) + (by_expert ? experts * kMostAlignment : 0);
    static constexpr uint32_t kHidden[] = {16, 8, 32, 128, 256, 512, 7, 24};
    static constexpr ncclDataType_t kTypes[] = {ncclBfloat16, ncclFloat16, ncclFloat32, ncclUint8};
    const ncclDataType_t dtype = kTypes[input_.below(4)];
    const size_t hidden = kHidden[input_.below(8)];
    const bool has_weights = input_.below(2) == 0;

    Padded<crossdockElasticCombine_t> call;
    crossdockElasticCombine_t& whole = call.whole;
    rows_are_fixed_ = true;
    whole.tokens = tensor(dtype, {rows, hidden});
    whole.topk_weights = by_expert ? tensor_if(has_weights, ncclFloat32, {rows})
                                   : tensor_if(has_weights, ncclFloat32, {rows, chosen.topk});
    rows_are_fixed_ = false;
    for (const ncclEpTensor_t*& bias : whole.bias) {
        bias = tensor_if(input_.below(2) == 0, dtype, {chosen.num_tokens, hidden});
    }
    whole.out_tokens = tensor(dtype, {chosen.num_tokens, hidden});
    whole.out_topk_weights = tensor_if(has_weights, ncclFloat32, {chosen.num_tokens, chosen.topk});
    expect(crossdockElasticCombine(chosen.handle, break_struct(call), nullptr), "crossdockElasticCombine");
}

}  // namespace crossdock::fuzz
