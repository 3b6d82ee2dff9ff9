// SPDX-License-Identifier: Apache-2.0
// High throughput with masks: ranks that die or stay away, in every phase, are left out by the others, and by nobody
// else's mistake.
#include <gtest/gtest.h>
#include <signal.h>

#include "conformance/ht/mask_support.h"
#include "conformance/support/scoped_arena.h"

namespace crossdock::testing {
namespace {

TEST(HtMask, SurvivorsOfKilledProcessesGoOn) {
    on_each_backend({Backend::kProcesses}, [](const BackendSpec& backend) {
        constexpr int kRanks = 4;
        for (int round = 0; round < 2 * kMaskPhases; ++round) {
            const bool two_die = round % 2 == 1;
            BackendSpec spec = backend;
            spec.doomed = two_die ? std::vector<int>{1, 3} : std::vector<int>{2};
            expect_clean(spec, kRanks, std::nullopt, [=, doomed = spec.doomed](RankContext& context) {
                const Problem problem =
                    mask_problem(kRanks, kHtLayouts[round / kMaskPhases], static_cast<uint64_t>(round));
                const OwnedGroup group = mask_group(context, problem, kNeverNs);
                DegradedLayer layer(context, group.get(), problem);
                layer.step();
                RANK_CHECK(context, async_error(context, group.get()) == 0, "an error without a cause");
                const bool dies = std::find(doomed.begin(), doomed.end(), context.rank()) != doomed.end();
                for (int phase = 0; phase < 2 * kMaskPhases; ++phase) {
                    if (dies && phase == round % kMaskPhases) raise(SIGKILL);
                    layer.run(phase % kMaskPhases);
                }
                const ActiveRanks left = two_die ? all_but(kRanks, {1, 3}) : all_but(kRanks, {2});
                RANK_CHECK(context, query_mask(context, group.get()) == left, "not exactly the dead are masked");
                RANK_CHECK(context, async_error(context, group.get()) == 1, "no asynchronous error");
                RANK_OK(context, ncclEpErrorClear(group.get()));
                layer.route(mask_problem(kRanks, problem.layout, 99));
                layer.step();
                RANK_CHECK(context, async_error(context, group.get()) == 0, "a masked rank was waited for");
            });
        }
    });
    EXPECT_EQ(left_in_shared_memory(), std::vector<std::string>());
}

// One rank's run of a backend in which a rank may be killed at any step. with_windows: rows go straight from window to
// window.
void live_on(RankContext& context, ncclEpLayout_t layout, int dead, bool with_windows) {
    const Problem problem = mask_problem(context.num_ranks(), layout, 2);
    // A rank that dies while a group or a window is made takes it along.
    const OwnedGroup group = try_mask_group(context, problem, 1'000'000);
    if (group == nullptr) return;
    std::optional<ScopedArena> arena;
    if (with_windows) arena.emplace(context, kHtWindowBytes);
    LayerOptions options;
    options.arena = arena ? arena->get() : nullptr;
    options.windows = kOutputs | kCombineInput | kInputs;
    DegradedLayer layer(context, group.get(), problem, options);
    for (int step = 0; step < 3; ++step) {
        layer.route(mask_problem(context.num_ranks(), layout, static_cast<uint64_t>(step)));
        layer.step();
        const ActiveRanks active = query_mask(context, group.get());
        for (int rank = 0; rank < context.num_ranks() && context.rank() != dead; ++rank)
            RANK_CHECK(context, active[static_cast<size_t>(rank)] == 1 || rank == dead, "rank {} is masked wrongly",
                       rank);
    }
}

// Windows are registered and deregistered by all ranks, or not at all.
bool is_about_windows(const std::string& failure) {
    return failure.find("in window registration, waiting for rank") != std::string::npos ||
           failure.find("in window deregistration, waiting for rank") != std::string::npos;
}

// As fibers, killed at many steps.
void kill_at_every_step(const BackendSpec& backend, ncclEpLayout_t layout, bool with_windows, uint64_t num_seeds) {
    constexpr int kRanks = 3;
    constexpr int kDead = 1;
    const RankProgram program = [=](RankContext& context) { live_on(context, layout, kDead, with_windows); };
    harm_at_many_steps(backend, Harm::kKill, kRanks, kDead, seeds_or(0, num_seeds), program,
                       [](std::vector<std::string>& failures) { std::erase_if(failures, is_about_windows); });
}

TEST(HtMask, SurvivorsOfAKillAtAnyStepGoOn) {
    on_each_backend({Backend::kSimulation}, [](const BackendSpec& backend) {
        for (const ncclEpLayout_t layout : kHtLayouts) kill_at_every_step(backend, layout, false, 900);
    });
}

TEST(HtMask, SurvivorsOfAKillAtAnyStepGoOnWithWindows) {
    on_each_backend({Backend::kSimulation}, [](const BackendSpec& backend) {
        for (const ncclEpLayout_t layout : kHtLayouts) kill_at_every_step(backend, layout, true, 250);
    });
}

// Two of four ranks stay away, the second one later by some phases: they are lost at once or one after the other, also
// while the others still wait for the first.
TEST(HtMask, SeveralRanksAreLost) {
    on_each_backend_as_one_team(kEveryBackend, [](const BackendSpec& spec) {
        for (int missed = 0; missed < kMaskPhases; ++missed) {
            for (int later = 0; later < 2; ++later) {
                expect_clean(spec, 4, std::nullopt, [=](RankContext& context) {
                    const Problem problem = mask_problem(4, kHtLayouts[(missed + later) % 2], 5);
                    const OwnedGroup group = mask_group(context, problem, short_timeout_ns(context));
                    DegradedLayer layer(context, group.get(), problem);
                    layer.step();
                    const int last = context.rank() == 1   ? missed
                                     : context.rank() == 2 ? missed + later
                                                           : 2 * kMaskPhases;
                    for (int phase = 0; phase < last; ++phase) layer.run(phase % kMaskPhases);
                    if (last == 2 * kMaskPhases) {
                        RANK_CHECK(context, query_mask(context, group.get()) == all_but(4, {1, 2}),
                                   "not exactly the absent ranks are masked");
                        RANK_CHECK(context, async_error(context, group.get()) == 1, "no asynchronous error");
                    }
                    context.barrier();
                });
            }
        }
    });
}

}  // namespace
}  // namespace crossdock::testing
