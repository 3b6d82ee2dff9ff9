// SPDX-License-Identifier: Apache-2.0
// High throughput: every wrong ncclEpCombine gets its code and a message that names what is wrong; nothing is written
// and the group goes on.
#include <gtest/gtest.h>

#include "conformance/ht/bad_call.h"
#include "conformance/support/with_domain.h"

namespace crossdock::testing {
namespace {

using Row = Spoiled<HtCombineCall>;
using Call = HtCombineCall&;

void check_on_each_backend(ncclEpLayout_t layout, const auto& table) {
    on_each_backend(kEveryBackend, [&](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [&](RankContext& context) {
            HtVictim victim(context, layout);
            check_refusals(context, victim, table);
        });
    });
}

const Row kForward[] = {
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
    {"rows 3-D", [](Call c) { c.rows.tensor.ndim = 3, c.rows.sizes[2] = 1; }, "tokens"},
    {"rows 1-D", [](Call c) { c.rows.tensor.ndim = 1; }, "tokens"},
    {"output 3-D", [](Call c) { c.combined.tensor.ndim = 3, c.combined.sizes[2] = 1; }, "tokens"},
    {"output with one row too many", [](Call c) { c.combined.sizes[0] += 1; }, "tokens"},
    {"output with one row too few", [](Call c) { c.combined.sizes[0] -= 1; }, "tokens"},
    {"output of another width", [](Call c) { c.combined.sizes[1] = 128; }, "tokens"},
    {"output of another type", [](Call c) { c.combined.tensor.datatype = ncclFloat32; }, "tokens"},
    {"8-bit rows", [](Call c) { c.rows.tensor.datatype = c.combined.tensor.datatype = ncclFloat8e4m3; }, "tokens"},
    {"rows of 8 bytes", [](Call c) { c.rows.sizes[1] = c.combined.sizes[1] = 4; }, "16"},
    {"rows of no bytes", [](Call c) { c.rows.sizes[1] = c.combined.sizes[1] = 0; }, "tokens"},
    {"rows larger than max_token_bytes", [](Call c) { c.rows.sizes[1] = c.combined.sizes[1] = 648; },
     "max_token_bytes"},
    {"rows of more than 32 bits of bytes",
     [](Call c) { c.rows.sizes[1] = c.combined.sizes[1] = (size_t{1} << 31) + 64; }, "max_token_bytes"},
    {"rows misaligned", [](Call c) { c.rows.tensor.data = c.victim.input() + 2; }, "16"},
    {"output misaligned", [](Call c) { c.combined.tensor.data = c.victim.output() + 2; }, "16"},
    {"forbidden weights", [](Call c) { c.inputs.topk_weights = &c.weights.tensor; }, "topk_weights"},
    {"scales", [](Call c) { c.inputs.scales = &c.scales.tensor; }, "scales"},
    {"a recipe of low latency", [](Call c) { c.config.quant_recipe = NCCL_EP_COMB_QUANT_NVFP4; }, "quant_recipe"},
    {"unknown recipe", [](Call c) { c.config.quant_recipe = static_cast<ncclEpCombQuant_t>(3); }, "quant_recipe"},
    {"unknown direction", [](Call c) { c.config.pass_direction = static_cast<ncclEpPassDir_t>(-1); }, "pass_direction"},
};

TEST(HtBadCombine, Forward) {
    for (const ncclEpLayout_t layout : kHtLayouts) check_on_each_backend(layout, kForward);
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
    for (const ncclEpLayout_t layout : kHtLayouts) check_on_each_backend(layout, kBackward);
}

const Row kFlatBackward[] = {
    {"weights of another width", [](Call c) { c.go_backward(), c.weights.sizes[1] = 3; }, "topk_weights"},
    {"weights 1-D", [](Call c) { c.go_backward(), c.weights.tensor.ndim = 1; }, "topk_weights"},
};
const Row kExpertMajorBackward[] = {
    {"weights 2-D", [](Call c) { c.go_backward(), c.weights.tensor.ndim = 2, c.weights.sizes[1] = 2; }, "topk_weights"},
};

TEST(HtBadCombine, WeightsOfALayout) {
    check_on_each_backend(NCCL_EP_LAYOUT_FLAT, kFlatBackward);
    check_on_each_backend(NCCL_EP_LAYOUT_EXPERT_MAJOR, kExpertMajorBackward);
}

const Row kQuantised[] = {
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
    if (is_one_domain(ranks_or(2))) check_on_each_backend(NCCL_EP_LAYOUT_EXPERT_MAJOR, kQuantised);
    check_on_each_backend(NCCL_EP_LAYOUT_FLAT, kQuantisedFlat);
}

// Between domains rows are summed on their way, so they cross as they are.
TEST(HtBadCombine, QuantisedRowsStayInADomain) {
    const WithDomain domain(1);
    const Row rows[] = {
        {"MXFP8", [](Call c) { c.config.quant_recipe = NCCL_EP_COMB_QUANT_MXFP8; }, "one LSA team", ncclInvalidUsage},
    };
    on_each_backend({Backend::kProcesses, Backend::kThreads, Backend::kSimulation}, [&](const BackendSpec& spec) {
        expect_clean(spec, 2, std::nullopt, [&](RankContext& context) {
            HtVictim victim(context, NCCL_EP_LAYOUT_EXPERT_MAJOR);
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
                HtVictim victim(context, layout, true);
                check_refusals(context, victim, rows);
            });
        }
    });
}

// Nothing is ever pending.
TEST(HtBadCombine, CompleteHasNothingToDo) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            HtVictim victim(context, NCCL_EP_LAYOUT_FLAT);
            ncclEpCompleteConfig_t config = NCCL_EP_COMPLETE_CONFIG_INIT;
            RANK_OK(context, ncclEpComplete(victim.handle(), nullptr, nullptr));
            RANK_OK(context, ncclEpComplete(victim.handle(), &config, nullptr));
            config.magic = 2;
            RANK_REFUSED(context, ncclInvalidArgument, "magic", ncclEpComplete(victim.handle(), &config, nullptr));
            victim.check_working();
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
