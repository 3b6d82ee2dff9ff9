// SPDX-License-Identifier: Apache-2.0
// Every wrong ncclEpCombine and ncclEpComplete gets its code and a message that names what is wrong; nothing is
// written and the group goes on.
#include <gtest/gtest.h>

#include "conformance/ll/bad_call.h"

namespace crossdock::testing {
namespace {

using Row = Spoiled<CombineCall>;
using Call = CombineCall&;

const Row kExpertMajor[] = {
    {"handle NULL", [](Call c) { c.handle = nullptr; }, "handle"},
    {"inputs NULL", [](Call c) { c.inputs_pointer = nullptr; }, "inputs"},
    {"outputs NULL", [](Call c) { c.outputs_pointer = nullptr; }, "outputs"},
    {"inputs too small", [](Call c) { c.inputs.size = 23; }, "size"},
    {"inputs' magic", [](Call c) { c.inputs.magic = 1; }, "magic"},
    {"outputs too small", [](Call c) { c.outputs.size = 23; }, "size"},
    {"outputs' magic", [](Call c) { c.outputs.magic = 1; }, "magic"},
    {"config too small", [](Call c) { c.config.size = 15; }, "size"},
    {"config's magic", [](Call c) { c.config.magic = 1; }, "magic"},
    {"no rows", [](Call c) { c.inputs.tokens = nullptr; }, "tokens"},
    {"no output", [](Call c) { c.outputs.tokens = nullptr; }, "tokens"},
    {"a tensor too small", [](Call c) { c.combined.tensor.size = 40; }, "size"},
    {"a tensor's magic", [](Call c) { c.rows.tensor.magic = 0; }, "magic"},
    {"a tensor without extents", [](Call c) { c.rows.tensor.sizes = nullptr; }, "sizes"},
    {"rows without memory", [](Call c) { c.rows.tensor.data = nullptr; }, "tokens"},
    {"output without memory", [](Call c) { c.combined.tensor.data = nullptr; }, "tokens"},
    {"rows 2-D", [](Call c) { c.rows.tensor.ndim = 2; }, "tokens"},
    {"output 3-D", [](Call c) { c.combined.tensor.ndim = 3, c.combined.sizes[2] = 1; }, "tokens"},
    {"rows of another block", [](Call c) { c.rows.sizes[0] += 1; }, "tokens"},
    {"rows of fewer slots", [](Call c) { c.rows.sizes[1] -= 1; }, "tokens"},
    {"output with one row too many", [](Call c) { c.combined.sizes[0] += 1; }, "tokens"},
    {"output of another width", [](Call c) { c.combined.sizes[1] = 128; }, "tokens"},
    {"output of another type", [](Call c) { c.combined.tensor.datatype = ncclFloat32; }, "tokens"},
    {"8-bit rows", [](Call c) { c.rows.tensor.datatype = c.combined.tensor.datatype = ncclFloat8e4m3; }, "tokens"},
    {"rows of 8 bytes", [](Call c) { c.rows.sizes[2] = c.combined.sizes[1] = 4; }, "16"},
    {"rows of no bytes", [](Call c) { c.rows.sizes[2] = c.combined.sizes[1] = 0; }, "tokens"},
    {"rows larger than max_token_bytes", [](Call c) { c.rows.sizes[2] = c.combined.sizes[1] = 648; },
     "max_token_bytes"},
    {"rows misaligned", [](Call c) { c.rows.tensor.data = c.victim.input() + 2; }, "16"},
    {"no weights", [](Call c) { c.outputs.topk_weights = nullptr; }, "topk_weights"},
    {"weights of another type", [](Call c) { c.weights.tensor.datatype = ncclFloat16; }, "topk_weights"},
    {"weights of another width", [](Call c) { c.weights.sizes[1] = 1; }, "topk_weights"},
    {"weights with other rows", [](Call c) { c.weights.sizes[0] = 4; }, "topk_weights"},
    {"scales without a recipe", [](Call c) { c.quantise(), c.config.quant_recipe = NCCL_EP_COMB_QUANT_NONE; },
     "scales"},
    {"a recipe of high throughput", [](Call c) { c.config.quant_recipe = NCCL_EP_COMB_QUANT_MXFP8; }, "2 (MXFP8)"},
    {"unknown recipe", [](Call c) { c.config.quant_recipe = static_cast<ncclEpCombQuant_t>(3); }, "quant_recipe"},
    {"unknown direction", [](Call c) { c.config.pass_direction = static_cast<ncclEpPassDir_t>(-1); }, "pass_direction"},
    {"backward", [](Call c) { c.config.pass_direction = NCCL_EP_BWD_PASS; }, "pass_direction", ncclInvalidUsage},
};

const Row kNvfp4[] = {
    {"no scales", [](Call c) { c.quantise(), c.inputs.scales = nullptr; }, "scales"},
    {"scales of another type", [](Call c) { c.quantise(), c.scales.tensor.datatype = ncclBfloat16; }, "scales"},
    {"two scales a row", [](Call c) { c.quantise(), c.scales.sizes[2] = 2; }, "scales"},
    {"scales of fewer slots", [](Call c) { c.quantise(), c.scales.sizes[1] -= 1; }, "scales"},
    {"rows of fp16", [](Call c) { c.quantise(), c.rows.tensor.datatype = c.combined.tensor.datatype = ncclFloat16; },
     "tokens"},
    {"48 elements", [](Call c) { c.quantise(), c.rows.sizes[2] = c.combined.sizes[1] = 48; }, "32"},
};

// Whoever asks for NVFP4 where the device cannot learns that, whatever else is wrong.
TEST(BadCombine, Fp4OnADeviceWithoutItIsRefusedFirst) {
    on_each_backend({Backend::kCuda, Backend::kCudaProcesses}, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            Victim victim(context, NCCL_EP_LAYOUT_EXPERT_MAJOR);
            CombineCall call(victim);
            call.quantise();
            call.inputs.tokens = nullptr;
            const ncclResult_t result = call();
            const bool is_capable = result == ncclInvalidArgument;
            if (!is_capable) RANK_REFUSED(context, ncclInvalidUsage, "compute capability 10.0", call());
        });
    });
}

TEST(BadCombine, Tensors) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt,
                     [](RankContext& context) { check_refusals(context, NCCL_EP_LAYOUT_EXPERT_MAJOR, kExpertMajor); });
    });
}

TEST(BadCombine, Nvfp4) {
    on_each_backend(kBackends, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : {NCCL_EP_LAYOUT_EXPERT_MAJOR, NCCL_EP_LAYOUT_RANK_MAJOR}) {
            expect_clean(spec, 2, std::nullopt, [=](RankContext& context) { check_refusals(context, layout, kNvfp4); });
        }
    });
}

TEST(BadCombine, NeedsADispatch) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            Victim victim(context, NCCL_EP_LAYOUT_RANK_MAJOR);
            Layer fresh(context, victim.group(), victim.problem());
            RANK_REFUSED(context, ncclInvalidUsage, "ispatch", fresh.combine());
            fresh.round_trip();
        });
    });
}

TEST(BadCombine, Complete) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            Victim victim(context, NCCL_EP_LAYOUT_RANK_MAJOR);
            ncclEpCompleteConfig_t config = NCCL_EP_COMPLETE_CONFIG_INIT;
            RANK_REFUSED(context, ncclInvalidArgument, "handle", ncclEpComplete(nullptr, nullptr, nullptr));
            config.size = 7;
            RANK_REFUSED(context, ncclInvalidArgument, "size", ncclEpComplete(victim.handle(), &config, nullptr));
            config = NCCL_EP_COMPLETE_CONFIG_INIT;
            config.magic = 0;
            RANK_REFUSED(context, ncclInvalidArgument, "magic", ncclEpComplete(victim.handle(), &config, nullptr));
            victim.check_working();
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
