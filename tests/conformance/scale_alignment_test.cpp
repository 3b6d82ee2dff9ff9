// SPDX-License-Identifier: Apache-2.0
// In plain memory scales may begin wherever their type allows: slices of a larger tensor do. So may computed ones in
// windows, where forwarded ones begin at multiples of 16 bytes (bad_call_test.cpp).
#include <gtest/gtest.h>

#include "conformance/support/layer.h"
#include "conformance/support/options.h"
#include "conformance/support/scoped_arena.h"
#include "conformance/support/with_lsa_team.h"

namespace crossdock::testing {
namespace {

struct Scales {
    ncclEpDispQuant_t recipe;
    ncclDataType_t type;
    size_t num;  // a row
};

constexpr size_t kHidden = 512;
constexpr Scales kForwarded[] = {{NCCL_EP_DISP_QUANT_FWD, ncclFloat32, 4},
                                 {NCCL_EP_DISP_QUANT_FWD, ncclFloat16, 40},
                                 {NCCL_EP_DISP_QUANT_FWD, ncclUint8, 16}};

std::vector<Scales> computed_scales() {
    std::vector<Scales> scales;
    for (const DispatchRecipe& recipe : quantising_dispatches())
        scales.push_back({recipe.value, recipe.scale_type, kHidden / recipe.scale_block});
    return scales;
}

// All ranks in one LSA team, and each in one of its own where the network is simulated.
void with_lsa_teams(const BackendSpec& spec, const auto& run) {
    run();
    if (spec.kind != Backend::kSimulation) return;
    const WithLsaTeam alone(1);
    run();
}

void check_low_latency(RankContext& context, const Scales& scales, ncclEpLayout_t layout, int max_tokens,
                       bool in_window) {
    Problem problem;
    problem.num_ranks = context.num_ranks();
    problem.num_experts = 2 * problem.num_ranks;
    problem.max_tokens = max_tokens;
    problem.num_topk = 3;
    problem.layout = layout;
    problem.recipe = scales.recipe;
    problem.hidden = kHidden;
    problem.token_type = scales.recipe == NCCL_EP_DISP_QUANT_FWD ? ncclFloat8e4m3 : ncclBfloat16;
    problem.scale_type = scales.type;
    problem.num_scales = scales.num;
    problem = rerouted(problem, 7);
    ScopedArena arena(context, 4u << 20);
    {
        Group group(context, problem);
        Layer layer(context, group.get(), problem, {.arena = in_window ? arena.get() : nullptr, .odd_scales = true});
        for (uint64_t step = 0; step < 3; ++step) {
            layer.round_trip();
            layer.route(rerouted(problem, 8 + step));
        }
        context.barrier();
    }
}

void check_low_latency_everywhere(const BackendSpec& spec, const auto& table) {
    for (const Scales& scales : table) {
        for (const ncclEpLayout_t layout : kLlLayouts) {
            for (const int max_tokens : {6, 40}) {  // on GPUs rows of few tokens travel in another form
                for (const bool in_window : {false, true}) {
                    if (in_window && scales.recipe == NCCL_EP_DISP_QUANT_FWD) continue;
                    expect_clean(spec, ranks_or(3), std::nullopt, [=](RankContext& context) {
                        check_low_latency(context, scales, layout, max_tokens, in_window);
                    });
                }
            }
        }
    }
}

TEST(ScaleAlignment, LowLatencyForwards) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        with_lsa_teams(spec, [&] { check_low_latency_everywhere(spec, kForwarded); });
    });
}

TEST(ScaleAlignment, LowLatencyQuantises) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        with_lsa_teams(spec, [&] { check_low_latency_everywhere(spec, computed_scales()); });
    });
}

TEST(ScaleAlignment, HighThroughput) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        with_lsa_teams(spec, [&] {
            for (const Scales& scales : kForwarded) {
                for (const ncclEpLayout_t layout : kHtLayouts) {
                    expect_clean(spec, ranks_or(3), std::nullopt, [=](RankContext& context) {
                        Problem problem = plain_problem(context.num_ranks(), layout, 12, kHighThroughput);
                        problem.recipe = scales.recipe;
                        problem.token_type = ncclFloat8e4m3;
                        problem.hidden = 256;
                        problem.scale_type = scales.type;
                        problem.num_scales = scales.num;
                        Group group(context, problem);
                        Layer layer(context, group.get(), problem, {.odd_scales = true});
                        for (uint64_t step = 0; step < 3; ++step) {
                            layer.round_trip();
                            layer.route(rerouted(problem, 120 + step));
                        }
                    });
                }
            }
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
