// SPDX-License-Identifier: Apache-2.0
// Tensors in windows give the same results as tensors in plain memory, however they are named, with and without zero
// copy.
#include <gtest/gtest.h>

#include "conformance/support/layer.h"
#include "conformance/support/options.h"
#include "conformance/support/scoped_arena.h"

namespace crossdock::testing {
namespace {

constexpr size_t kWindowBytes = 48u << 20;

// Outputs still hold the last step's rows, and nothing but the library keeps a fast peer from writing the next ones
// over them.
void window_round_trips(RankContext& context, const Problem& problem, ncclEpZeroCopyMode_t mode, Naming naming,
                        bool keep_outputs) {
    ScopedArena arena(context, kWindowBytes);
    ncclEpGroupConfig_t config = group_config_for(context, problem);
    config.zero_copy = mode;
    Group group(context, context.comm(), config);
    const uint32_t overlap_rows = problem.seed % 3 == 0 ? 2 : 0;
    Layer layer(context, group.get(), problem,
                {.arena = arena.get(), .naming = naming, .overlap_rows = overlap_rows, .keep_outputs = keep_outputs});
    layer.round_trip();
    for (uint64_t step = 1; step < 5; ++step) {
        layer.route(rerouted(problem, problem.seed * 100 + step));
        layer.round_trip();
    }
    // No peer writes into the window any more when it goes.
    context.barrier();
}

TEST(Window, RandomProblemsMatchTheReference) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        const Seeds seeds = seeds_or(5001, seeds_in(spec.kind, 40));
        for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
            Random random(seed);
            const int num_ranks = ranks_or(random.between(1, 4));
            const Problem problem = random_problem(seed, {.num_ranks = num_ranks,
                                                          .most_row_bytes = 1024,
                                                          .most_receive_bytes = 512u << 10,
                                                          .quantised_combines = !is_cuda(spec.kind)});
            const auto naming = random.pick({Naming::kWindowOnly, Naming::kWindowAndData});
            const auto mode = random.pick({NCCL_EP_ZERO_COPY_AUTO, NCCL_EP_ZERO_COPY_OFF});
            const bool keep_outputs = random.chance(50);
            SCOPED_TRACE(problem.describe());
            BackendSpec seeded = spec;
            seeded.simulation.seed = seed;
            expect_clean(seeded, num_ranks, seed, [=](RankContext& context) {
                window_round_trips(context, problem, mode, naming, keep_outputs);
            });
        }
    });
}

TEST(Window, RankMajorRowsGoStraightIntoTheOutput) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpZeroCopyMode_t mode : {NCCL_EP_ZERO_COPY_ON, NCCL_EP_ZERO_COPY_AUTO}) {
            for (const bool keep_outputs : {false, true}) {
                expect_clean(spec, ranks_or(4), std::nullopt, [=](RankContext& context) {
                    window_round_trips(context, plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_RANK_MAJOR, 9), mode,
                                       Naming::kWindowOnly, keep_outputs);
                });
            }
        }
    });
}

TEST(Window, ForwardedScalesGoAlong) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(3), std::nullopt, [](RankContext& context) {
            Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_RANK_MAJOR, 10);
            problem.recipe = NCCL_EP_DISP_QUANT_FWD;
            problem.token_type = ncclFloat8e4m3;
            problem.num_scales = 4;
            window_round_trips(context, problem, NCCL_EP_ZERO_COPY_ON, Naming::kWindowOnly, true);
        });
    });
}

TEST(Window, ZeroCopyOnRefusesDispatchesWithoutWindows) {
    on_each_backend(reaching_windows(kEveryBackend), [](const BackendSpec& spec) {
        // Expert-major dispatch has no path into windows at all.
        for (const ncclEpLayout_t layout : {NCCL_EP_LAYOUT_RANK_MAJOR, NCCL_EP_LAYOUT_EXPERT_MAJOR}) {
            expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
                const Problem problem = plain_problem(context.num_ranks(), layout, 11);
                ncclEpGroupConfig_t config = group_config_for(context, problem);
                config.zero_copy = NCCL_EP_ZERO_COPY_ON;
                Group group(context, context.comm(), config);
                Layer layer(context, group.get(), problem);
                layer.prepare_dispatch();
                RANK_REFUSED(context, ncclInvalidArgument, "window", layer.dispatch());
            });
        }
    });
}

// Groups that promise windows have two buffers: one may be held by a split, all other operations follow each other in
// the other one.
TEST(Window, PromisedWindowsAllowOnePendingSplit) {
    on_each_backend(reaching_windows(kEveryBackend), [](const BackendSpec& spec) {
        const Seeds seeds = seeds_or(1, seeds_in(spec.kind, 40));
        for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
            BackendSpec seeded = spec;
            seeded.simulation.seed = seed;
            expect_clean(seeded, ranks_or(3), seed, [=](RankContext& context) {
                const Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_RANK_MAJOR, seed);
                ScopedArena arena(context, 1u << 20);
                ncclEpGroupConfig_t config = group_config_for(context, problem);
                config.zero_copy = NCCL_EP_ZERO_COPY_ON;
                Group group(context, context.comm(), config);
                const LayerOptions in_window{.arena = arena.get(), .naming = Naming::kWindowOnly, .keep_outputs = true};
                Layer a(context, group.get(), problem, in_window), b(context, group.get(), problem, in_window);
                for (uint64_t step = 0; step < 4; ++step) {
                    a.route(rerouted(problem, 100 * seed + 2 * step));
                    b.route(rerouted(problem, 100 * seed + 2 * step + 1));
                    for (Layer* layer : {&a, &b}) layer->prepare_dispatch();
                    RANK_OK(context, a.send_dispatch());
                    RANK_REFUSED(context, ncclInvalidUsage, "pending", b.send_dispatch());
                    RANK_OK(context, b.dispatch());
                    b.check_dispatch();
                    b.prepare_combine();
                    RANK_OK(context, b.combine());
                    b.check_combine();
                    RANK_OK(context, a.complete());
                    a.check_dispatch();
                    a.prepare_combine();
                    RANK_OK(context, a.send_combine());
                    RANK_OK(context, b.combine());
                    b.check_combine();
                    RANK_OK(context, a.complete());
                    a.check_combine();
                }
                context.barrier();
            });
        }
    });
}

// Two windows, tensors of one operation in both.
TEST(Window, TensorsOfAStepLieInSeveralWindows) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const Problem problem = plain_problem(context.num_ranks(), NCCL_EP_LAYOUT_RANK_MAJOR, 12);
            ScopedArena first(context, 1u << 20), second(context, 2u << 20);
            Group group(context, problem);
            Layer a(context, group.get(), problem, {.arena = first.get(), .naming = Naming::kWindowOnly});
            Layer b(context, group.get(), rerouted(problem, 13),
                    {.arena = second.get(), .naming = Naming::kWindowAndData});
            for (int i = 0; i < 3; ++i) {
                a.round_trip();
                b.round_trip();
            }
            context.barrier();
        });
    });
}

TEST(Window, RegistrationRefusesWhatIsNoWindow) {
    on_each_backend(kCpuBackends, [](const BackendSpec& spec) {
        expect_clean(spec, 2, std::nullopt, [](RankContext& context) {
            void* memory = nullptr;
            RANK_REFUSED(context, ncclInvalidArgument, "memory", crossdockMemAlloc(nullptr, 4096));
            RANK_REFUSED(context, ncclInvalidArgument, "size", crossdockMemAlloc(&memory, 0));
            RANK_CHECK(context, memory == nullptr, "a refused crossdockMemAlloc wrote {}", memory);
            RANK_OK(context, crossdockMemAlloc(&memory, 4096));
            const bool zeroed = static_cast<const std::byte*>(memory)[4095] == std::byte{0};
            RANK_CHECK(context, zeroed && reinterpret_cast<uintptr_t>(memory) % 4096 == 0, "memory {}", memory);
            ncclWindow_t window = nullptr;
            RANK_REFUSED(context, ncclInvalidArgument, "comm",
                         crossdockCommWindowRegister(nullptr, memory, 4096, &window, 0));
            RANK_REFUSED(context, ncclInvalidArgument, "window",
                         crossdockCommWindowRegister(context.comm(), memory, 4096, nullptr, 0));
            RANK_REFUSED(context, ncclInvalidArgument, "", crossdockCommWindowDeregister(context.comm(), nullptr));
            RANK_CHECK(context, window == nullptr, "a refused registration wrote a window");
            context.barrier();
            RANK_OK(context, crossdockCommWindowRegister(context.comm(), memory, 4096, &window, 0));
            RANK_OK(context, crossdockCommWindowDeregister(context.comm(), window));
            RANK_OK(context, crossdockMemFree(memory));
            RANK_OK(context, crossdockMemFree(nullptr));
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
