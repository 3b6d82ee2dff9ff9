// SPDX-License-Identifier: Apache-2.0
// Low latency: every ncclEpDispatch that is wrong in this mode only (bad_call_test.cpp has what is wrong in both) gets
// its code and a message that names what is wrong; nothing is written and the group goes on.
#include <gtest/gtest.h>

#include "conformance/ll/bad_call.h"

namespace crossdock::testing {
namespace {

using Row = Spoiled<DispatchCall>;
using Call = DispatchCall&;

const Row kExpertMajor[] = {
    {"layout_info NULL", [](Call c) { c.info_pointer = nullptr; }, "expert_counters"},
    {"output over the routing", [](Call c) { c.received.tensor.data = c.victim.routing(); },
     "outputs->tokens overlaps the handle's topk_idx"},
    {"output with another block", [](Call c) { c.received.sizes[0] += 1; }, "tokens"},
    {"output with fewer slots", [](Call c) { c.received.sizes[1] -= 1; }, "tokens"},
    {"backward", [](Call c) { c.config.pass_direction = NCCL_EP_BWD_PASS; }, "pass_direction", ncclInvalidUsage},
    {"forbidden weights", [](Call c) { c.inputs.topk_weights = &c.weights.tensor; }, "topk_weights"},
    {"forbidden output weights", [](Call c) { c.outputs.topk_weights = &c.received_weights.tensor; }, "topk_weights"},
    {"forbidden output ids", [](Call c) { c.outputs.topk_idx = &c.received_ids.tensor; }, "topk_idx"},
    {"forbidden source counters", [](Call c) { c.info.src_rank_counters = &c.counters.tensor; }, "src_rank_counters"},
    {"no counters", [](Call c) { c.info.expert_counters = nullptr; }, "expert_counters"},
    {"counters of another type", [](Call c) { c.counters.tensor.datatype = ncclInt64; }, "expert_counters"},
    {"counters misaligned", [](Call c) { c.counters.tensor.data = c.victim.output() + 2; }, "a multiple of 4"},
    {"counters over the input", [](Call c) { c.counters.tensor.data = c.victim.input() + 128; },
     "expert_counters overlaps inputs->tokens"},
    {"counters too short", [](Call c) { c.counters.sizes[0] -= 1; }, "expert_counters"},
    {"counters 2-D", [](Call c) { c.counters.tensor.ndim = 2, c.counters.sizes[1] = 1; }, "expert_counters"},
};

TEST(BadDispatch, ExpertMajor) { check_on_each_backend(NCCL_EP_LAYOUT_EXPERT_MAJOR, kExpertMajor); }

const Row kRankMajor[] = {
    {"output ids over weights", [](Call c) { c.received_ids.tensor.data = c.victim.input() + 4; },
     "outputs->topk_idx overlaps inputs->"},
    {"output over weights", [](Call c) { c.weights.tensor.data = c.victim.output() + 64; },
     "outputs->tokens overlaps inputs->topk_weights"},
    {"output weights 2-D", [](Call c) { c.received_weights.tensor.ndim = 2; }, "topk_weights"},
    {"output weights of another width", [](Call c) { c.received_weights.sizes[2] = 1; }, "topk_weights"},
    {"no output ids", [](Call c) { c.outputs.topk_idx = nullptr; }, "topk_idx"},
    {"output ids of 64 bits", [](Call c) { c.received_ids.tensor.datatype = ncclInt64; }, "topk_idx"},
    {"output ids with fewer slots", [](Call c) { c.received_ids.sizes[1] -= 1; }, "topk_idx"},
    {"output with another block", [](Call c) { c.received.sizes[0] += 1; }, "tokens"},
    {"output with more slots", [](Call c) { c.received.sizes[1] += 1; }, "tokens"},
    {"forbidden expert counters", [](Call c) { c.info.expert_counters = &c.counters.tensor; }, "expert_counters"},
    {"source counters of another type", [](Call c) { c.counters.tensor.datatype = ncclInt64; }, "src_rank_counters"},
    {"source counters too short", [](Call c) { c.counters.sizes[0] -= 1; }, "src_rank_counters"},
    {"unknown id kind", [](Call c) { c.info.recv_topk_idx_kind = static_cast<ncclEpExpertIdKind_t>(3); },
     "recv_topk_idx_kind"},
};

TEST(BadDispatch, RankMajor) { check_on_each_backend(NCCL_EP_LAYOUT_RANK_MAJOR, kRankMajor); }

const Row kQuantised[] = {
    {"misaligned FP8 scales", [](Call c) { c.quantise(), c.received_scales.tensor.data = c.victim.output() + 1; },
     "a multiple of 4"},
    {"FP8 of fp16", [](Call c) { c.quantise(), c.tokens.tensor.datatype = ncclFloat16; }, "tokens"},
    {"FP8 into bf16", [](Call c) { c.quantise(), c.received.tensor.datatype = ncclBfloat16; }, "tokens"},
    {"FP8 without scales", [](Call c) { c.quantise(), c.outputs.scales = nullptr; }, "scales"},
    {"FP8 with input scales",
     [](Call c) {
         c.forward_scales();
         c.quantise();
     },
     "scales"},
    {"FP8 scales of another width", [](Call c) { c.quantise(), c.received_scales.sizes[2] = 8; }, "scales"},
    {"FP8 scales of another type", [](Call c) { c.quantise(), c.received_scales.tensor.datatype = ncclBfloat16; },
     "scales"},
    {"FP8 of 64 elements", [](Call c) { c.quantise(), c.tokens.sizes[1] = c.received.sizes[2] = 64; }, "128"},
};

TEST(BadDispatch, Recipes) {
    check_on_each_backend(NCCL_EP_LAYOUT_EXPERT_MAJOR, kQuantised);
    check_on_each_backend(NCCL_EP_LAYOUT_RANK_MAJOR, kQuantised);
}

}  // namespace
}  // namespace crossdock::testing
