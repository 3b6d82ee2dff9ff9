// SPDX-License-Identifier: Apache-2.0
#include "conformance/ll/bad_call.h"

namespace crossdock::testing {

DispatchCall::DispatchCall(Victim& made_for) : DispatchCallOf(made_for) {
    counters.set(ncclInt32, {received.sizes[0]}, victim.output());
    if (victim.problem().expert_major()) {
        info.expert_counters = &counters.tensor;
        return;
    }
    info.src_rank_counters = &counters.tensor;
    inputs.topk_weights = &weights.tensor;
    outputs.topk_weights = &received_weights.tensor;
    outputs.topk_idx = &received_ids.tensor;
}

void DispatchCall::quantise() {
    config.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4;
    tokens.width() = received.width() = 512;
    received.tensor.datatype = ncclFloat8e4m3;
    received_scales.set(ncclFloat32, victim.extents_of_rows(4), victim.output());
    outputs.scales = &received_scales.tensor;
}

CombineCall::CombineCall(Victim& made_for) : CombineCallOf(made_for) {
    weights.set(ncclFloat32, {kVictimTokens, kVictimTopk}, victim.input());
    if (victim.problem().expert_major()) outputs.topk_weights = &weights.tensor;
}

void CombineCall::quantise() {
    config.quant_recipe = NCCL_EP_COMB_QUANT_NVFP4;
    inputs.scales = &scales.tensor;
}

}  // namespace crossdock::testing
