// SPDX-License-Identifier: Apache-2.0
// High throughput: every wrong ncclEpDispatch gets its code and a message that names what is wrong; nothing is written
// and the group goes on.
#include <gtest/gtest.h>

#include "conformance/ht/bad_call.h"

namespace crossdock::testing {
namespace {

using Row = Spoiled<HtDispatchCall>;
using Call = HtDispatchCall&;

void check_on_each_backend(ncclEpLayout_t layout, bool is_eager, const auto& table) {
    on_each_backend(kEveryBackend, [&](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [&](RankContext& context) {
            HtVictim victim(context, layout, is_eager);
            check_refusals(context, victim, table);
        });
    });
}

const Row kCommon[] = {
    {"handle NULL", [](Call c) { c.handle = nullptr; }, "handle"},
    {"inputs NULL", [](Call c) { c.inputs_pointer = nullptr; }, "inputs"},
    {"outputs NULL", [](Call c) { c.outputs_pointer = nullptr; }, "outputs"},
    {"inputs too small", [](Call c) { c.inputs.size = 31; }, "size"},
    {"inputs' magic", [](Call c) { c.inputs.magic = 1; }, "magic"},
    {"outputs too small", [](Call c) { c.outputs.size = 39; }, "size"},
    {"outputs' magic", [](Call c) { c.outputs.magic = NCCL_EP_TENSOR_MAGIC; }, "magic"},
    {"layout_info too small", [](Call c) { c.info.size = 39; }, "size"},
    {"layout_info's magic", [](Call c) { c.info.magic = 0; }, "magic"},
    {"config too small", [](Call c) { c.config.size = 19; }, "size"},
    {"config's magic", [](Call c) { c.config.magic = 0; }, "magic"},
    {"no tokens", [](Call c) { c.inputs.tokens = nullptr; }, "tokens"},
    {"no output tokens", [](Call c) { c.outputs.tokens = nullptr; }, "tokens"},
    {"a tensor too small", [](Call c) { c.tokens.tensor.size = 47; }, "size"},
    {"a tensor's magic", [](Call c) { c.tokens.tensor.magic = NCCL_EP_MAGIC; }, "magic"},
    {"a tensor that says it was allocated", [](Call c) { c.tokens.tensor.magic = 0xBEEFBEEFu; }, "tokens"},
    {"a tensor without extents", [](Call c) { c.tokens.tensor.sizes = nullptr; }, "sizes"},
    {"a tensor without memory", [](Call c) { c.tokens.tensor.data = nullptr; }, "tokens"},
    {"an output without memory", [](Call c) { c.received.tensor.data = nullptr; }, "tokens"},
    {"tokens 1-D", [](Call c) { c.tokens.tensor.ndim = 1; }, "tokens"},
    {"tokens 3-D", [](Call c) { c.tokens.tensor.ndim = 3, c.tokens.sizes[2] = 1; }, "tokens"},
    {"one row too many", [](Call c) { c.tokens.sizes[0] += 1; }, "tokens"},
    {"one row too few", [](Call c) { c.tokens.sizes[0] -= 1; }, "tokens"},
    {"rows of 126 bytes", [](Call c) { c.tokens.sizes[1] = c.received.sizes[1] = 63; }, "16"},
    {"rows of no bytes", [](Call c) { c.tokens.sizes[1] = c.received.sizes[1] = 0; }, "tokens"},
    {"rows larger than max_token_bytes", [](Call c) { c.tokens.sizes[1] = c.received.sizes[1] = 648; },
     "max_token_bytes"},
    {"rows far too large", [](Call c) { c.tokens.sizes[1] = c.received.sizes[1] = ~size_t{0} / 2; }, "tokens"},
    {"rows of more than 32 bits of bytes",
     [](Call c) { c.tokens.sizes[1] = c.received.sizes[1] = (size_t{1} << 31) + 64; }, "max_token_bytes"},
    {"tokens misaligned", [](Call c) { c.tokens.tensor.data = c.victim.input() + 8; }, "16"},
    {"output misaligned", [](Call c) { c.received.tensor.data = c.victim.output() + 2; }, "16"},
    {"integer tokens", [](Call c) { c.tokens.tensor.datatype = c.received.tensor.datatype = ncclInt32; }, "tokens"},
    {"8-bit tokens into 8 other bits",
     [](Call c) {
         c.tokens.tensor.datatype = ncclUint8;
         c.received.tensor.datatype = ncclFloat8e4m3;
     },
     "tokens"},
    {"another output type", [](Call c) { c.received.tensor.datatype = ncclFloat16; }, "tokens"},
    {"output 3-D", [](Call c) { c.received.tensor.ndim = 3, c.received.sizes[2] = 1; }, "tokens"},
    {"output 1-D", [](Call c) { c.received.tensor.ndim = 1; }, "tokens"},
    {"output of another width", [](Call c) { c.received.sizes[1] = 128; }, "tokens"},
    {"output with too few rows", [](Call c) { c.received.sizes[0] -= 1; }, "tokens"},
    {"output with no rows", [](Call c) { c.received.sizes[0] = 0; }, "tokens"},
    {"scales without a recipe", [](Call c) { c.inputs.scales = &c.weights.tensor; }, "scales"},
    {"output scales without a recipe", [](Call c) { c.outputs.scales = &c.received_weights.tensor; }, "scales"},
    {"unknown recipe", [](Call c) { c.config.quant_recipe = static_cast<ncclEpDispQuant_t>(9); }, "quant_recipe"},
    {"a recipe of low latency", [](Call c) { c.config.quant_recipe = NCCL_EP_DISP_QUANT_DS_FP8E3M4; }, "quant_recipe"},
    {"unknown direction", [](Call c) { c.config.pass_direction = static_cast<ncclEpPassDir_t>(9); }, "pass_direction"},
    {"no weights", [](Call c) { c.inputs.topk_weights = nullptr; }, "topk_weights"},
    {"output over its input's end", [](Call c) { c.received.tensor.data = c.victim.input() + 2 * 128 + 112; },
     "outputs->tokens overlaps inputs->tokens"},
    {"output weights over weights", [](Call c) { c.received_weights.tensor.data = c.victim.input() + 4; },
     "outputs->topk_weights overlaps inputs->"},
    {"weights misaligned", [](Call c) { c.weights.tensor.data = c.victim.input() + 2; }, "a multiple of 4"},
    {"weights of another type", [](Call c) { c.weights.tensor.datatype = ncclBfloat16; }, "topk_weights"},
    {"weights of another width", [](Call c) { c.weights.sizes[1] = 3; }, "topk_weights"},
    {"weights with other rows", [](Call c) { c.weights.sizes[0] = 2; }, "topk_weights"},
    {"weights 1-D", [](Call c) { c.weights.tensor.ndim = 1; }, "topk_weights"},
    {"no output weights", [](Call c) { c.outputs.topk_weights = nullptr; }, "topk_weights"},
    {"output weights of another type", [](Call c) { c.received_weights.tensor.datatype = ncclInt32; }, "topk_weights"},
    {"output weights with too few rows", [](Call c) { c.received_weights.sizes[0] -= 1; }, "topk_weights"},
    {"output weights 3-D", [](Call c) { c.received_weights.tensor.ndim = 3, c.received_weights.sizes[2] = 1; },
     "topk_weights"},
};

TEST(HtBadDispatch, Flat) { check_on_each_backend(NCCL_EP_LAYOUT_FLAT, false, kCommon); }

TEST(HtBadDispatch, ExpertMajor) { check_on_each_backend(NCCL_EP_LAYOUT_EXPERT_MAJOR, false, kCommon); }

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

TEST(HtBadDispatch, FlatMetadata) { check_on_each_backend(NCCL_EP_LAYOUT_FLAT, false, kFlat); }

const Row kExpertMajor[] = {
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

TEST(HtBadDispatch, ExpertMajorMetadata) { check_on_each_backend(NCCL_EP_LAYOUT_EXPERT_MAJOR, false, kExpertMajor); }

const Row kForwarding[] = {
    {"no scales", [](Call c) { c.forward_scales(), c.inputs.scales = nullptr; }, "scales"},
    {"no output scales", [](Call c) { c.forward_scales(), c.outputs.scales = nullptr; }, "scales"},
    {"scales of another width", [](Call c) { c.forward_scales(), c.received_scales.sizes[1] = 64; }, "scales"},
    {"scales of another type", [](Call c) { c.forward_scales(), c.received_scales.tensor.datatype = ncclFloat8e4m3; },
     "scales"},
    {"scales with other rows", [](Call c) { c.forward_scales(), c.scales.sizes[0] = 2; }, "scales"},
    {"output scales with other rows", [](Call c) { c.forward_scales(), c.received_scales.sizes[0] += 1; }, "scales"},
    {"output scales with too few rows", [](Call c) { c.forward_scales(), c.received_scales.sizes[0] -= 1; }, "scales"},
    {"output scales 3-D",
     [](Call c) { c.forward_scales(), c.received_scales.tensor.ndim = 3, c.received_scales.sizes[2] = 1; }, "scales"},
    {"scale rows of 24 bytes", [](Call c) { c.forward_scales(), c.scales.sizes[1] = c.received_scales.sizes[1] = 24; },
     "16"},
    {"no scales in a row", [](Call c) { c.forward_scales(), c.scales.sizes[1] = c.received_scales.sizes[1] = 0; },
     "scales"},
    {"scale rows of more than 32 bits of bytes",
     [](Call c) { c.forward_scales(), c.scales.sizes[1] = c.received_scales.sizes[1] = (size_t{1} << 32) + 128; },
     "max_token_bytes"},
    {"integer scales",
     [](Call c) { c.forward_scales(), c.scales.tensor.datatype = c.received_scales.tensor.datatype = ncclInt64; },
     "scales"},
    {"tokens of uint32",
     [](Call c) { c.forward_scales(), c.tokens.tensor.datatype = c.received.tensor.datatype = ncclUint32; }, "tokens"},
    {"token and scales larger than max_token_bytes",
     [](Call c) { c.forward_scales(), c.tokens.sizes[1] = c.received.sizes[1] = 584; }, "max_token_bytes"},
    {"rounded scales", [](Call c) { c.forward_scales(), c.config.round_scales = 1; }, "round_scales"},
    {"scales misaligned",
     [](Call c) {
         c.forward_scales();
         c.scales.tensor.datatype = c.received_scales.tensor.datatype = ncclFloat32;
         c.scales.sizes[1] = c.received_scales.sizes[1] = 32;
         c.scales.tensor.data = c.victim.input() + 2;
     },
     "a multiple of 4"},
    {"output scales over scales", [](Call c) { c.forward_scales(), c.scales.tensor.data = c.victim.output() + 128; },
     "outputs->"},
    {"output over its input", [](Call c) { c.forward_scales(), c.tokens.tensor.data = c.victim.output(); },
     "outputs->tokens overlaps inputs->tokens"},
};

TEST(HtBadDispatch, Forwarding) {
    for (const ncclEpLayout_t layout : kHtLayouts) check_on_each_backend(layout, false, kForwarding);
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
        check_on_each_backend(layout, false, kBackward);
        check_on_each_backend(layout, true, kBackward);
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
    for (const ncclEpLayout_t layout : kHtLayouts) check_on_each_backend(layout, true, kEager);
}

// Forwarded tokens and scales lie both in windows, or both in plain memory; a window is named rightly.
TEST(HtBadDispatch, Windows) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                const Window window = context.make_window(1u << 16);
                {
                    HtVictim victim(context, layout);
                    HtDispatchCall tokens_only(victim);
                    tokens_only.forward_scales();
                    tokens_only.received.tensor.win_hdl = window.handle;
                    tokens_only.received.tensor.data = nullptr;
                    RANK_REFUSED(context, ncclInvalidArgument, "scales", tokens_only());
                    HtDispatchCall scales_only(victim);
                    scales_only.forward_scales();
                    scales_only.received_scales.tensor.win_hdl = window.handle;
                    scales_only.received_scales.tensor.data = nullptr;
                    RANK_REFUSED(context, ncclInvalidArgument, "scales", scales_only());
                    const auto refused = [&](const char* word, void* data, uint64_t offset) {
                        HtDispatchCall call(victim);
                        call.received.tensor.win_hdl = window.handle;
                        call.received.tensor.data = data;
                        call.received.tensor.win_offset = offset;
                        RANK_REFUSED(context, ncclInvalidArgument, word, call());
                    };
                    refused("tokens", window.memory + 16, 32);  // two addresses
                    refused("16", nullptr, 8);
                    // NCCL looks into any window it is given, and does not tell how long one is.
                    if (!context.is_gpu()) refused("tokens", nullptr, window.bytes - 16);
                    victim.check_untouched("a wrong window");
                    victim.check_working();
                }
                context.destroy_window(window);
            });
        }
    });
}

// A handle that was never updated has no routing, unless its memory has.
TEST(HtBadDispatch, NeedsARouting) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                HtVictim victim(context, layout);
                ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
                config.dispatch_output_per_expert_alignment = victim.problem().alignment;
                ncclEpHandle_t fresh = nullptr;
                RANK_OK(context, ncclEpInitHandle(&fresh, victim.group(), layout, &config, 2, nullptr));
                HtDispatchCall dispatch(victim);
                HtCombineCall combine(victim);
                dispatch.handle = combine.handle = fresh;
                RANK_REFUSED(context, ncclInvalidUsage, "ncclEpUpdateHandle", dispatch());
                RANK_REFUSED(context, ncclInvalidUsage, "ncclEpUpdateHandle", combine());
                dispatch.go_backward();
                RANK_REFUSED(context, ncclInvalidUsage, "ncclEpUpdateHandle", dispatch());
                RANK_OK(context, ncclEpHandleDestroy(fresh));
                victim.check_untouched("calls without a routing");
                victim.check_working();
            });
        }
    });
}

}  // namespace
}  // namespace crossdock::testing
