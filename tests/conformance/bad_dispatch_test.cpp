// SPDX-License-Identifier: Apache-2.0
// Every ncclEpDispatch that is wrong in one mode only (bad_call_test.cpp has what is wrong in both) gets its code and a
// message that names what is wrong; nothing is written and the group goes on.
#include <gtest/gtest.h>

#include "conformance/support/bad_call.h"

namespace crossdock::testing {
namespace {

using Row = Spoiled<DispatchCall>;
using Call = DispatchCall&;

// Low latency.

const Row kLlExpertMajor[] = {
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

TEST(BadDispatch, ExpertMajor) { check_on_each_backend(kLowLatency, NCCL_EP_LAYOUT_EXPERT_MAJOR, kLlExpertMajor); }

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

TEST(BadDispatch, RankMajor) { check_on_each_backend(kLowLatency, NCCL_EP_LAYOUT_RANK_MAJOR, kRankMajor); }

const Row kLlQuantised[] = {
    {"misaligned scales", [](Call c) { c.quantise(), c.received_scales.tensor.data = c.victim.output() + 1; },
     "a multiple of 4"},
    {"rows of fp16", [](Call c) { c.quantise(), c.tokens.tensor.datatype = ncclFloat16; }, "tokens"},
    {"rows into bf16", [](Call c) { c.quantise(), c.received.tensor.datatype = ncclBfloat16; }, "tokens"},
    {"no scales", [](Call c) { c.quantise(), c.outputs.scales = nullptr; }, "scales"},
    {"input scales",
     [](Call c) {
         c.forward_scales();
         c.quantise();
     },
     "scales"},
    {"scales of another width", [](Call c) { c.quantise(), c.received_scales.sizes[2] *= 2; }, "scales"},
    {"scales of another type", [](Call c) { c.quantise(), c.received_scales.tensor.datatype = ncclBfloat16; },
     "scales"},
    {"rows of half a block",
     [](Call c) { c.quantise(), c.tokens.sizes[1] = c.received.sizes[2] = c.victim.dispatch_recipe.scale_block / 2; },
     "multiples of"},
};

TEST(BadDispatch, Recipes) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kLlLayouts) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                Victim victim(context, kLowLatency, layout);
                for (const DispatchRecipe& recipe : quantising_dispatches()) {
                    victim.dispatch_recipe = recipe;
                    check_refusals(context, victim, kLlQuantised);
                }
            });
        }
    });
}

// High throughput.

const Row kHtOutputs[] = {
    {"output 3-D", [](Call c) { c.received.tensor.ndim = 3, c.received.sizes[2] = 1; }, "tokens"},
    {"output with too few rows", [](Call c) { c.received.sizes[0] -= 1; }, "tokens"},
    {"output with no rows", [](Call c) { c.received.sizes[0] = 0; }, "tokens"},
    {"a recipe of low latency", [](Call c) { c.config.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4; }, "quant_recipe"},
    {"output weights 3-D", [](Call c) { c.received_weights.tensor.ndim = 3, c.received_weights.sizes[2] = 1; },
     "topk_weights"},
};

TEST(HtBadDispatch, Outputs) {
    for (const ncclEpLayout_t layout : kHtLayouts) check_on_each_backend(kHighThroughput, layout, kHtOutputs);
}

const Row kFlat[] = {
    {"no output ids", [](Call c) { c.outputs.topk_idx = nullptr; }, "topk_idx"},
    {"output ids of 32 bits", [](Call c) { c.received_ids.tensor.datatype = ncclInt32; }, "topk_idx"},
    {"output ids with too few rows", [](Call c) { c.received_ids.sizes[0] -= 1; }, "topk_idx"},
    {"output ids with other rows than the weights", [](Call c) { c.received_ids.sizes[0] += 1; }, "topk_"},
    {"output ids of another width", [](Call c) { c.received_ids.sizes[1] += 1; }, "topk_idx"},
    {"output ids 1-D", [](Call c) { c.received_ids.tensor.ndim = 1; }, "topk_idx"},
    {"output weights of another width", [](Call c) { c.received_weights.sizes[1] = 1; }, "topk_weights"},
    {"output weights 1-D", [](Call c) { c.received_weights.tensor.ndim = 1; }, "topk_weights"},
    {"unknown id kind", [](Call c) { c.info.recv_topk_idx_kind = static_cast<ncclEpExpertIdKind_t>(3); },
     "recv_topk_idx_kind"},
};

TEST(HtBadDispatch, FlatMetadata) { check_on_each_backend(kHighThroughput, NCCL_EP_LAYOUT_FLAT, kFlat); }

const Row kHtExpertMajor[] = {
    {"forbidden output ids", [](Call c) { c.outputs.topk_idx = &c.received_ids.tensor; }, "topk_idx"},
    {"output weights 2-D", [](Call c) { c.received_weights.tensor.ndim = 2, c.received_weights.sizes[1] = 2; },
     "topk_weights"},
    {"counters too short", [](Call c) { c.info.expert_counters = &c.counters.tensor, c.counters.sizes[0] -= 1; },
     "expert_counters"},
    {"counters 2-D",
     [](Call c) {
         c.info.expert_counters = &c.counters.tensor;
         c.counters.tensor.ndim = 2, c.counters.sizes[1] = 1;
     },
     "expert_counters"},
    {"counters of no integer",
     [](Call c) { c.info.expert_counters = &c.counters.tensor, c.counters.tensor.datatype = ncclFloat32; },
     "expert_counters"},
    {"offsets of another type than the counters",
     [](Call c) {
         c.info.expert_counters = &c.counters.tensor;
         c.spare.set(ncclInt64, {c.victim.local_experts()}, c.victim.output());
         c.info.expert_offsets = &c.spare.tensor;
     },
     "expert_offsets"},
    {"an empty total", [](Call c) { c.info.recv_total_counter = &c.counters.tensor, c.counters.sizes[0] = 0; },
     "recv_total_counter"},
};

TEST(HtBadDispatch, ExpertMajorMetadata) {
    check_on_each_backend(kHighThroughput, NCCL_EP_LAYOUT_EXPERT_MAJOR, kHtExpertMajor);
}

const Row kOutputScales[] = {
    {"output scales with too few rows", [](Call c) { c.forward_scales(), c.received_scales.sizes[0] -= 1; }, "scales"},
    {"output scales 3-D",
     [](Call c) { c.forward_scales(), c.received_scales.tensor.ndim = 3, c.received_scales.sizes[2] = 1; }, "scales"},
};

TEST(HtBadDispatch, OutputScales) {
    for (const ncclEpLayout_t layout : kHtLayouts) check_on_each_backend(kHighThroughput, layout, kOutputScales);
}

const Row kBackward[] = {
    {"forbidden weights", [](Call c) { c.go_backward(), c.inputs.topk_weights = &c.weights.tensor; }, "topk_weights"},
    {"forbidden output weights", [](Call c) { c.go_backward(), c.outputs.topk_weights = &c.received_weights.tensor; },
     "topk_weights"},
    {"forbidden output ids", [](Call c) { c.go_backward(), c.outputs.topk_idx = &c.received_ids.tensor; }, "topk_idx"},
    {"no tokens", [](Call c) { c.go_backward(), c.inputs.tokens = nullptr; }, "tokens"},
    {"output with too few rows", [](Call c) { c.go_backward(), c.received.sizes[0] -= 1; }, "tokens"},
    {"one row too many", [](Call c) { c.go_backward(), c.tokens.sizes[0] += 1; }, "tokens"},
};

TEST(HtBadDispatch, Backward) {
    for (const ncclEpLayout_t layout : kHtLayouts) {
        check_on_each_backend(kHighThroughput, layout, kBackward);
        check_on_each_backend(kHighThroughput, layout, kBackward, true);
    }
}

// As many rows as the routing brings are needed; all tensors are empty or none is.
const Row kEager[] = {
    {"too few rows", [](Call c) { c.received.sizes[0] -= 1; }, "tokens"},
    {"too few rows of weights", [](Call c) { c.received_weights.sizes[0] -= 1; }, "topk_weights"},
    {"no rows of weights", [](Call c) { c.received_weights.sizes[0] = 0, c.received_weights.tensor.data = nullptr; },
     "topk_weights"},
    {"no rows", [](Call c) { c.received.sizes[0] = 0, c.received.tensor.data = nullptr; }, "tokens"},
};

TEST(HtBadDispatch, Eager) {
    for (const ncclEpLayout_t layout : kHtLayouts) check_on_each_backend(kHighThroughput, layout, kEager, true);
}

// Forwarded tokens and scales lie both in windows, or both in plain memory.
TEST(HtBadDispatch, OneOfTwoInAWindow) {
    on_each_backend(reaching_windows(kEveryBackend), [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                const Window window = context.make_window(1u << 16);
                {
                    Victim victim(context, kHighThroughput, layout);
                    for (OpenTensor DispatchArguments::*tensor :
                         {&DispatchArguments::received, &DispatchArguments::received_scales}) {
                        DispatchCall call(victim);
                        call.forward_scales();
                        (call.*tensor).tensor.win_hdl = window.handle;
                        (call.*tensor).tensor.data = nullptr;
                        RANK_REFUSED(context, ncclInvalidArgument, "scales", call());
                    }
                    victim.check_untouched("a window of one");
                    victim.check_working();
                }
                context.destroy_window(window);
            });
        }
    });
}

}  // namespace
}  // namespace crossdock::testing
