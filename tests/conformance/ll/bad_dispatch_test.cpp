// SPDX-License-Identifier: Apache-2.0
// Every wrong ncclEpDispatch gets its code and a message that names what is wrong; nothing is written and the group
// goes on.
#include <gtest/gtest.h>

#include "conformance/ll/bad_call.h"

namespace crossdock::testing {
namespace {

using Row = Spoiled<DispatchCall>;
using Call = DispatchCall&;

void check_on_each_backend(ncclEpLayout_t layout, const auto& table) {
    on_each_backend(kEveryBackend, [&](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt,
                     [&](RankContext& context) { check_refusals(context, layout, table); });
    });
}

const Row kCommon[] = {
    {"handle NULL", [](Call c) { c.handle = nullptr; }, "handle"},
    {"inputs NULL", [](Call c) { c.inputs_pointer = nullptr; }, "inputs"},
    {"outputs NULL", [](Call c) { c.outputs_pointer = nullptr; }, "outputs"},
    {"layout_info NULL", [](Call c) { c.info_pointer = nullptr; }, "expert_counters"},
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
    {"rows of 126 bytes", [](Call c) { c.tokens.sizes[1] = c.received.sizes[2] = 63; }, "16"},
    {"rows of no bytes", [](Call c) { c.tokens.sizes[1] = c.received.sizes[2] = 0; }, "tokens"},
    {"rows larger than max_token_bytes", [](Call c) { c.tokens.sizes[1] = c.received.sizes[2] = 648; },
     "max_token_bytes"},
    {"rows far too large", [](Call c) { c.tokens.sizes[1] = c.received.sizes[2] = ~size_t{0} / 2; }, "tokens"},
    {"tokens misaligned", [](Call c) { c.tokens.tensor.data = c.victim.input() + 8; }, "16"},
    {"output over the routing", [](Call c) { c.received.tensor.data = c.victim.routing(); },
     "outputs->tokens overlaps the handle's topk_idx"},
    {"output misaligned", [](Call c) { c.received.tensor.data = c.victim.output() + 2; }, "16"},
    {"integer tokens", [](Call c) { c.tokens.tensor.datatype = c.received.tensor.datatype = ncclInt32; }, "tokens"},
    {"8-bit tokens into 8 other bits",
     [](Call c) {
         c.tokens.tensor.datatype = ncclUint8;
         c.received.tensor.datatype = ncclFloat8e4m3;
     },
     "tokens"},
    {"another output type", [](Call c) { c.received.tensor.datatype = ncclFloat16; }, "tokens"},
    {"output 2-D", [](Call c) { c.received.tensor.ndim = 2; }, "tokens"},
    {"output with another block", [](Call c) { c.received.sizes[0] += 1; }, "tokens"},
    {"output with fewer slots", [](Call c) { c.received.sizes[1] -= 1; }, "tokens"},
    {"output of another width", [](Call c) { c.received.sizes[2] = 128; }, "tokens"},
    {"scales without a recipe", [](Call c) { c.inputs.scales = &c.spare.tensor; }, "scales"},
    {"output scales without a recipe",
     [](Call c) {
         c.quantise();
         c.config.quant_recipe = NCCL_EP_DISP_QUANT_NONE;
         c.received.tensor.datatype = ncclBfloat16;
     },
     "scales"},
    {"unknown recipe", [](Call c) { c.config.quant_recipe = static_cast<ncclEpDispQuant_t>(9); }, "quant_recipe"},
    {"unknown direction", [](Call c) { c.config.pass_direction = static_cast<ncclEpPassDir_t>(9); }, "pass_direction"},
    {"backward", [](Call c) { c.config.pass_direction = NCCL_EP_BWD_PASS; }, "pass_direction", ncclInvalidUsage},
    {"forbidden weights", [](Call c) { c.inputs.topk_weights = &c.weights.tensor; }, "topk_weights"},
    {"forbidden output weights", [](Call c) { c.outputs.topk_weights = &c.received_weights.tensor; }, "topk_weights"},
    {"forbidden output ids", [](Call c) { c.outputs.topk_idx = &c.received_ids.tensor; }, "topk_idx"},
    {"forbidden source counters", [](Call c) { c.info.src_rank_counters = &c.counters.tensor; }, "src_rank_counters"},
    {"no counters", [](Call c) { c.info.expert_counters = nullptr; }, "expert_counters"},
    {"counters of another type", [](Call c) { c.counters.tensor.datatype = ncclInt64; }, "expert_counters"},
    {"counters misaligned", [](Call c) { c.counters.tensor.data = c.victim.output() + 2; }, "a multiple of 4"},
    {"output over its input", [](Call c) { c.tokens.tensor.data = c.victim.output(); },
     "outputs->tokens overlaps inputs->tokens"},
    {"output over its input's end", [](Call c) { c.received.tensor.data = c.victim.input() + 2 * 128 + 112; },
     "outputs->tokens overlaps inputs->tokens"},
    {"counters over the input", [](Call c) { c.counters.tensor.data = c.victim.input() + 128; },
     "expert_counters overlaps inputs->tokens"},
    {"counters too short", [](Call c) { c.counters.sizes[0] -= 1; }, "expert_counters"},
    {"counters 2-D", [](Call c) { c.counters.tensor.ndim = 2, c.counters.sizes[1] = 1; }, "expert_counters"},
};

TEST(BadDispatch, ExpertMajor) { check_on_each_backend(NCCL_EP_LAYOUT_EXPERT_MAJOR, kCommon); }

const Row kRankMajor[] = {
    {"no weights", [](Call c) { c.inputs.topk_weights = nullptr; }, "topk_weights"},
    {"weights of another type", [](Call c) { c.weights.tensor.datatype = ncclBfloat16; }, "topk_weights"},
    {"weights of another width", [](Call c) { c.weights.sizes[1] = 3; }, "topk_weights"},
    {"weights with other rows", [](Call c) { c.weights.sizes[0] = 2; }, "topk_weights"},
    {"no output weights", [](Call c) { c.outputs.topk_weights = nullptr; }, "topk_weights"},
    {"weights misaligned", [](Call c) { c.weights.tensor.data = c.victim.input() + 2; }, "a multiple of 4"},
    {"output weights over weights", [](Call c) { c.received_weights.tensor.data = c.victim.input() + 4; },
     "outputs->topk_weights overlaps inputs->"},
    {"output ids over weights", [](Call c) { c.received_ids.tensor.data = c.victim.input() + 4; },
     "outputs->topk_idx overlaps inputs->"},
    {"output over weights", [](Call c) { c.weights.tensor.data = c.victim.output() + 64; },
     "outputs->tokens overlaps inputs->topk_weights"},
    {"output weights 2-D", [](Call c) { c.received_weights.tensor.ndim = 2; }, "topk_weights"},
    {"output weights of another width", [](Call c) { c.received_weights.sizes[2] = 1; }, "topk_weights"},
    {"output weights of another type", [](Call c) { c.received_weights.tensor.datatype = ncclInt32; }, "topk_weights"},
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

const Row kForwarding[] = {
    {"no scales", [](Call c) { c.forward_scales(), c.inputs.scales = nullptr; }, "scales"},
    {"no output scales", [](Call c) { c.forward_scales(), c.outputs.scales = nullptr; }, "scales"},
    {"scales of another width", [](Call c) { c.forward_scales(), c.received_scales.sizes[2] = 64; }, "scales"},
    {"scales with other rows", [](Call c) { c.forward_scales(), c.scales.sizes[0] = 2; }, "scales"},
    {"integer scales",
     [](Call c) { c.forward_scales(), c.scales.tensor.datatype = c.received_scales.tensor.datatype = ncclInt32; },
     "scales"},
    {"another type of output scales",
     [](Call c) { c.forward_scales(), c.received_scales.tensor.datatype = ncclFloat8e4m3; }, "scales"},
    {"scales of 24 bytes", [](Call c) { c.forward_scales(), c.scales.sizes[1] = c.received_scales.sizes[2] = 24; },
     "16"},
    {"no scales in a row", [](Call c) { c.forward_scales(), c.scales.sizes[1] = c.received_scales.sizes[2] = 0; },
     "scales"},
    {"misaligned scales",
     [](Call c) {
         c.forward_scales();
         c.scales.tensor.datatype = c.received_scales.tensor.datatype = ncclFloat32;
         c.scales.sizes[1] = c.received_scales.sizes[2] = 32;
         c.scales.tensor.data = c.victim.input() + 2;
     },
     "a multiple of 4"},
    {"misaligned FP8 scales", [](Call c) { c.quantise(), c.received_scales.tensor.data = c.victim.output() + 1; },
     "a multiple of 4"},
    {"output scales over scales",
     [](Call c) {
         c.forward_scales(), c.scales.tensor.data = c.victim.output() + 128;
         c.received.tensor.data = c.victim.output() + Victim::kBufferBytes / 2;
     },
     "outputs->scales overlaps inputs->scales"},
    {"output over scales",
     [](Call c) {
         c.forward_scales(), c.scales.tensor.data = c.victim.output();
         c.received_scales.tensor.data = c.victim.output() + Victim::kBufferBytes / 2;
     },
     "outputs->tokens overlaps inputs->scales"},
    {"row and scales together too large",
     [](Call c) { c.forward_scales(), c.tokens.sizes[1] = c.received.sizes[2] = 592; }, "max_token_bytes"},
    {"rounded scales", [](Call c) { c.forward_scales(), c.config.round_scales = 1; }, "round_scales"},
    {"tokens of uint32",
     [](Call c) {
         c.forward_scales();
         c.tokens.tensor.datatype = c.received.tensor.datatype = ncclUint32;
     },
     "tokens"},
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
    check_on_each_backend(NCCL_EP_LAYOUT_EXPERT_MAJOR, kForwarding);
    check_on_each_backend(NCCL_EP_LAYOUT_RANK_MAJOR, kForwarding);
}

// A window that exists, named wrongly.
TEST(BadDispatch, Windows) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const Window window = context.make_window(1u << 16);
            {
                Victim victim(context, NCCL_EP_LAYOUT_EXPERT_MAJOR);
                const auto refused = [&](const char* word, void* data, uint64_t offset) {
                    DispatchCall call(victim);
                    call.tokens.tensor.win_hdl = window.handle;
                    call.tokens.tensor.data = data;
                    call.tokens.tensor.win_offset = offset;
                    RANK_REFUSED(context, ncclInvalidArgument, word, call());
                };
                refused("tokens", window.memory + 16, 32);  // two addresses
                refused("16", nullptr, 8);
                // NCCL looks into any window it is given, and does not tell how long one is.
                if (!context.is_gpu()) {
                    refused("tokens", nullptr, window.bytes - 16);    // the end is outside
                    refused("tokens", nullptr, window.bytes * 1000);  // everything is
                    refused("tokens", nullptr, ~uint64_t{0} - 15);    // offset + bytes wraps around
                    DispatchCall call(victim);
                    call.tokens.tensor.win_hdl = reinterpret_cast<ncclWindow_t>(0x1230);
                    RANK_REFUSED(context, ncclInvalidArgument, "win", call());
                }
                victim.check_untouched("a wrong window");
                victim.check_working();
            }
            context.destroy_window(window);
        });
    });
}

TEST(BadDispatch, NeedsARouting) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            Victim victim(context, NCCL_EP_LAYOUT_EXPERT_MAJOR);
            ncclEpHandle_t handle = nullptr;
            RANK_OK(context,
                    ncclEpInitHandle(&handle, victim.group(), NCCL_EP_LAYOUT_EXPERT_MAJOR, nullptr, 2, nullptr));
            DispatchCall call(victim);
            call.handle = handle;
            RANK_REFUSED(context, ncclInvalidUsage, "ncclEpUpdateHandle", call());
            CombineCall combine(victim);
            combine.handle = handle;
            RANK_REFUSED(context, ncclInvalidUsage, "", combine());
            RANK_OK(context, ncclEpComplete(handle, nullptr, nullptr));
            RANK_OK(context, ncclEpHandleDestroy(handle));
            victim.check_untouched("a call without routing");
            victim.check_working();
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
