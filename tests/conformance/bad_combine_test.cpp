// SPDX-License-Identifier: Apache-2.0
// Every ncclEpCombine that is wrong in one mode only (bad_call_test.cpp has what is wrong in both) gets its code and a
// message that names what is wrong; nothing is written and the group goes on.
#include <gtest/gtest.h>

#include "conformance/support/bad_call.h"
#include "conformance/support/modes.h"
#include "conformance/support/with_lsa_team.h"

namespace crossdock::testing {
namespace {

using Row = Spoiled<CombineCall>;
using Call = CombineCall&;

// Of either mode.

const Row kQuantised[] = {
    {"rows of fp16", [](Call c) { c.quantise(), c.rows.tensor.datatype = c.combined.tensor.datatype = ncclFloat16; },
     "allowed: bfloat16"},
    {"a multiple and a half of elements",
     [](Call c) { c.quantise(), c.rows.width() = c.combined.width() = c.victim.combine_recipe.row_multiple * 3 / 2; },
     "multiples of"},
};
const Row kRowScales[] = {
    {"no scales", [](Call c) { c.quantise(), c.inputs.scales = nullptr; }, "scales"},
    {"scales of another type", [](Call c) { c.quantise(), c.scales.tensor.datatype = ncclBfloat16; }, "scales"},
    {"two scales per row", [](Call c) { c.quantise(), c.scales.width() = 2; }, "scales"},
    {"scales of fewer rows", [](Call c) { c.quantise(), c.scales.sizes[c.scales.tensor.ndim - 2] -= 1; }, "scales"},
};
const Row kNoRowScales[] = {
    {"scales", [](Call c) { c.quantise(), c.inputs.scales = &c.scales.tensor; }, "scales"},
};
const Row kOfAnotherMode[] = {
    {"a recipe of the other mode", [](Call c) { c.quantise(), c.inputs.scales = nullptr; }, "is for"},
};

// Every recipe that quantises: in its mode with tensors that it does not take, in the other mode at all. A GPU may lack
// the recipe itself, which is judged before.
void check_recipes(RankContext& context, ncclEpAlgorithm_t mode, ncclEpLayout_t layout) {
    Victim victim(context, mode, layout);
    for (const CombineRecipe& recipe : kCombineRecipes) {
        victim.combine_recipe = recipe;
        if (!recipe.quantises() || (context.is_gpu() && !recipe.compute_capabilities.empty())) continue;
        if (!recipe.is_in(mode)) {
            check_refusals(context, victim, kOfAnotherMode);
            continue;
        }
        if (recipe.needs_expert_major && layout != NCCL_EP_LAYOUT_EXPERT_MAJOR) continue;
        if (recipe.needs_one_team && !is_one_lsa_team(context.num_ranks())) continue;
        check_refusals(context, victim, kQuantised);
        if (recipe.takes_row_scales) {
            check_refusals(context, victim, kRowScales);
        } else {
            check_refusals(context, victim, kNoRowScales);
        }
    }
}

TEST_BOTH_MODES(BadCombine, Recipes) {
    on_each_backend(kEveryBackend, [=](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : layouts_of(mode)) {
            expect_clean(spec, ranks_or(2), std::nullopt,
                         [=](RankContext& context) { check_recipes(context, mode, layout); });
        }
    });
}

// Low latency.

const Row kLlExpertMajor[] = {
    {"rows of another block", [](Call c) { c.rows.sizes[0] += 1; }, "tokens"},
    {"rows of fewer slots", [](Call c) { c.rows.sizes[1] -= 1; }, "tokens"},
    {"no weights", [](Call c) { c.outputs.topk_weights = nullptr; }, "topk_weights"},
    {"weights of another type", [](Call c) { c.weights.tensor.datatype = ncclFloat16; }, "topk_weights"},
    {"weights of another width", [](Call c) { c.weights.sizes[1] = 1; }, "topk_weights"},
    {"weights with other rows", [](Call c) { c.weights.sizes[0] = 4; }, "topk_weights"},
    {"backward", [](Call c) { c.config.pass_direction = NCCL_EP_BWD_PASS; }, "pass_direction", ncclInvalidUsage},
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

TEST(HtBadCombine, Forward) {
    for (const ncclEpLayout_t layout : kHtLayouts) check_on_each_backend(kHighThroughput, layout, kForward);
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

const Row kQuantisedFlat[] = {
    {"MXFP8", [](Call c) { c.config.quant_recipe = NCCL_EP_COMB_QUANT_MXFP8; }, "allowed in expert-major layout"},
};

TEST(HtBadCombine, QuantisedFlatRows) { check_on_each_backend(kHighThroughput, NCCL_EP_LAYOUT_FLAT, kQuantisedFlat); }

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
