// SPDX-License-Identifier: Apache-2.0
// Every ncclEpCombine that is wrong in one mode only (bad_call_test.cpp has what is wrong in both) gets its code and a
// message that names what is wrong; nothing is written and the group goes on.
#include <gtest/gtest.h>

#include "conformance/support/bad_call.h"
#include "conformance/support/with_lsa_team.h"

namespace crossdock::testing {
namespace {

using Row = Spoiled<CombineCall>;
using Call = CombineCall&;

// Low latency.

const Row kLlExpertMajor[] = {
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

// Whoever asks for NVFP4 where the device cannot learns that, whatever else is wrong: the mode, the layout, the
// tensors.
TEST(BadCombine, Fp4OnADeviceWithoutItIsRefusedFirst) {
    on_each_backend({Backend::kCuda, Backend::kCudaProcesses}, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            bool is_capable = false;  // low latency tells
            for (const ncclEpAlgorithm_t mode : {kLowLatency, kHighThroughput}) {
                for (const ncclEpLayout_t layout : layouts_of(mode)) {
                    Victim victim(context, mode, layout);
                    CombineCall call(victim);
                    call.quantise();
                    call.inputs.tokens = nullptr;
                    if (mode == kLowLatency) is_capable = call() == ncclInvalidArgument;
                    if (!is_capable) RANK_REFUSED(context, ncclInvalidUsage, "compute capability 10.0", call());
                }
            }
        });
    });
}

TEST(BadCombine, Tensors) { check_on_each_backend(kLowLatency, NCCL_EP_LAYOUT_EXPERT_MAJOR, kLlExpertMajor); }

TEST(BadCombine, Nvfp4) {
    on_each_backend(kCpuBackends, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kLlLayouts) {
            expect_clean(spec, 2, std::nullopt, [=](RankContext& context) {
                Victim victim(context, kLowLatency, layout);
                check_refusals(context, victim, kNvfp4);
            });
        }
    });
}

TEST(BadCombine, NeedsADispatch) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            Victim victim(context, kLowLatency, NCCL_EP_LAYOUT_RANK_MAJOR);
            Layer fresh(context, victim.group(), victim.problem());
            RANK_REFUSED(context, ncclInvalidUsage, "ispatch", fresh.combine());
            fresh.round_trip();
        });
    });
}

// High throughput.

const Row kForward[] = {
    {"rows 3-D", [](Call c) { c.rows.tensor.ndim = 3, c.rows.sizes[2] = 1; }, "tokens"},
    {"forbidden weights", [](Call c) { c.inputs.topk_weights = &c.weights.tensor; }, "topk_weights"},
};
const Row kRecipeOfLowLatency[] = {
    {"a recipe of low latency", [](Call c) { c.config.quant_recipe = NCCL_EP_COMB_QUANT_NVFP4; }, "quant_recipe"},
};

TEST(HtBadCombine, Forward) {
    for (const ncclEpLayout_t layout : kHtLayouts) check_on_each_backend(kHighThroughput, layout, kForward);
}

// A GPU may lack NVFP4 itself, which is judged before.
TEST(HtBadCombine, Nvfp4) {
    on_each_backend(kCpuBackends, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            expect_clean(spec, 2, std::nullopt, [=](RankContext& context) {
                Victim victim(context, kHighThroughput, layout);
                check_refusals(context, victim, kRecipeOfLowLatency);
            });
        }
    });
}

const Row kBackward[] = {
    {"no weights", [](Call c) { c.go_backward(), c.inputs.topk_weights = nullptr; }, "topk_weights"},
    {"no output weights", [](Call c) { c.go_backward(), c.outputs.topk_weights = nullptr; }, "topk_weights"},
    {"weights of another type", [](Call c) { c.go_backward(), c.weights.tensor.datatype = ncclBfloat16; },
     "topk_weights"},
    {"weights with too few rows", [](Call c) { c.go_backward(), c.weights.sizes[0] -= 1; }, "topk_weights"},
    {"weights 3-D", [](Call c) { c.go_backward(), c.weights.tensor.ndim = 3, c.weights.sizes[2] = 1; }, "topk_weights"},
    {"output weights of another type",
     [](Call c) { c.go_backward(), c.combined_weights.tensor.datatype = ncclFloat16; }, "topk_weights"},
    {"output weights of another width", [](Call c) { c.go_backward(), c.combined_weights.sizes[1] = 3; },
     "topk_weights"},
    {"output weights with other rows", [](Call c) { c.go_backward(), c.combined_weights.sizes[0] = 4; },
     "topk_weights"},
    {"output weights without memory", [](Call c) { c.go_backward(), c.combined_weights.tensor.data = nullptr; },
     "topk_weights"},
    {"output weights 1-D", [](Call c) { c.go_backward(), c.combined_weights.tensor.ndim = 1; }, "topk_weights"},
    {"scales", [](Call c) { c.go_backward(), c.inputs.scales = &c.scales.tensor; }, "scales"},
    {"no rows", [](Call c) { c.go_backward(), c.inputs.tokens = nullptr; }, "tokens"},
};

TEST(HtBadCombine, Backward) {
    for (const ncclEpLayout_t layout : kHtLayouts) check_on_each_backend(kHighThroughput, layout, kBackward);
}

const Row kFlatBackward[] = {
    {"weights of another width", [](Call c) { c.go_backward(), c.weights.sizes[1] = 3; }, "topk_weights"},
    {"weights 1-D", [](Call c) { c.go_backward(), c.weights.tensor.ndim = 1; }, "topk_weights"},
};
const Row kExpertMajorBackward[] = {
    {"weights 2-D", [](Call c) { c.go_backward(), c.weights.tensor.ndim = 2, c.weights.sizes[1] = 2; }, "topk_weights"},
};

TEST(HtBadCombine, WeightsOfALayout) {
    check_on_each_backend(kHighThroughput, NCCL_EP_LAYOUT_FLAT, kFlatBackward);
    check_on_each_backend(kHighThroughput, NCCL_EP_LAYOUT_EXPERT_MAJOR, kExpertMajorBackward);
}

const Row kHtQuantised[] = {
    {"MXFP8 of fp16",
     [](Call c) {
         c.config.quant_recipe = NCCL_EP_COMB_QUANT_MXFP8;
         c.rows.tensor.datatype = c.combined.tensor.datatype = ncclFloat16;
     },
     "allowed: bfloat16"},
    {"MXFP8 rows of 48 elements",
     [](Call c) {
         c.config.quant_recipe = NCCL_EP_COMB_QUANT_MXFP8;
         c.rows.sizes[1] = c.combined.sizes[1] = 48;
     },
     "multiples of 32"},
    {"MXFP8 with scales",
     [](Call c) {
         c.config.quant_recipe = NCCL_EP_COMB_QUANT_MXFP8;
         c.inputs.scales = &c.scales.tensor;
     },
     "scales"},
};
const Row kQuantisedFlat[] = {
    {"MXFP8", [](Call c) { c.config.quant_recipe = NCCL_EP_COMB_QUANT_MXFP8; }, "allowed in expert-major layout"},
};

TEST(HtBadCombine, QuantisedRows) {
    if (is_one_lsa_team(ranks_or(2))) check_on_each_backend(kHighThroughput, NCCL_EP_LAYOUT_EXPERT_MAJOR, kHtQuantised);
    check_on_each_backend(kHighThroughput, NCCL_EP_LAYOUT_FLAT, kQuantisedFlat);
}

// Between teams rows are summed on their way, so they cross as they are.
TEST(HtBadCombine, QuantisedRowsStayInATeam) {
    const WithLsaTeam team(1);
    const Row rows[] = {
        {"MXFP8", [](Call c) { c.config.quant_recipe = NCCL_EP_COMB_QUANT_MXFP8; }, "one LSA team", ncclInvalidUsage},
    };
    on_each_backend({Backend::kProcesses, Backend::kThreads, Backend::kSimulation}, [&](const BackendSpec& spec) {
        expect_clean(spec, 2, std::nullopt, [&](RankContext& context) {
            Victim victim(context, kHighThroughput, NCCL_EP_LAYOUT_EXPERT_MAJOR);
            check_refusals(context, victim, rows);
        });
    });
}

// Fewer rows than were received: refused where the host knows, as it does on CPUs and in eager mode; never read.
TEST(HtBadCombine, TooFewRows) {
    const Row rows[] = {
        {"too few rows", [](Call c) { c.rows.sizes[0] = 2; }, "tokens"},
        {"no rows", [](Call c) { c.rows.sizes[0] = 0, c.rows.tensor.data = nullptr; }, "tokens"},
    };
    on_each_backend({Backend::kProcesses, Backend::kThreads, Backend::kSimulation}, [&](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kHtLayouts) {
            expect_clean(spec, ranks_or(2), std::nullopt, [&](RankContext& context) {
                Victim victim(context, kHighThroughput, layout, true);
                check_refusals(context, victim, rows);
            });
        }
    });
}

}  // namespace
}  // namespace crossdock::testing
