// SPDX-License-Identifier: Apache-2.0
// Low latency: every ncclEpCombine that is wrong in this mode only (bad_call_test.cpp has what is wrong in both) gets
// its code and a message that names what is wrong; nothing is written and the group goes on.
#include <gtest/gtest.h>

#include "conformance/ll/bad_call.h"

namespace crossdock::testing {
namespace {

using Row = Spoiled<CombineCall>;
using Call = CombineCall&;

const Row kExpertMajor[] = {
    {"rows of another block", [](Call c) { c.rows.sizes[0] += 1; }, "tokens"},
    {"rows of fewer slots", [](Call c) { c.rows.sizes[1] -= 1; }, "tokens"},
    {"no weights", [](Call c) { c.outputs.topk_weights = nullptr; }, "topk_weights"},
    {"weights of another type", [](Call c) { c.weights.tensor.datatype = ncclFloat16; }, "topk_weights"},
    {"weights of another width", [](Call c) { c.weights.sizes[1] = 1; }, "topk_weights"},
    {"weights with other rows", [](Call c) { c.weights.sizes[0] = 4; }, "topk_weights"},
    {"a recipe of high throughput", [](Call c) { c.config.quant_recipe = NCCL_EP_COMB_QUANT_MXFP8; }, "2 (MXFP8)"},
    {"backward", [](Call c) { c.config.pass_direction = NCCL_EP_BWD_PASS; }, "pass_direction", ncclInvalidUsage},
};

const Row kNvfp4[] = {
    {"no scales", [](Call c) { c.quantise(), c.inputs.scales = nullptr; }, "scales"},
    {"scales of another type", [](Call c) { c.quantise(), c.scales.tensor.datatype = ncclBfloat16; }, "scales"},
    {"two scales per row", [](Call c) { c.quantise(), c.scales.sizes[2] = 2; }, "scales"},
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

TEST(BadCombine, Tensors) { check_on_each_backend(NCCL_EP_LAYOUT_EXPERT_MAJOR, kExpertMajor); }

TEST(BadCombine, Nvfp4) {
    on_each_backend(kCpuBackends, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : {NCCL_EP_LAYOUT_EXPERT_MAJOR, NCCL_EP_LAYOUT_RANK_MAJOR}) {
            expect_clean(spec, 2, std::nullopt, [=](RankContext& context) {
                Victim victim(context, layout);
                check_refusals(context, victim, kNvfp4);
            });
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

}  // namespace
}  // namespace crossdock::testing
