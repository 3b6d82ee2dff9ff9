// SPDX-License-Identifier: Apache-2.0
// With masks, a rank that does not answer is left out and the others go on; a rank that lives can come back.
#include <gtest/gtest.h>
#include <signal.h>

#include "conformance/support/fault_support.h"

namespace crossdock::testing {
namespace {

ActiveRanks all_but(int num_ranks, int rank) {
    ActiveRanks active(num_ranks, 1);
    active[rank] = 0;
    return active;
}

// A process that has ended is left out at once, whatever the timeout.
TEST(Mask, SurvivorsOfAKilledProcessGoOn) {
    on_each_backend({Backend::kProcesses, Backend::kHosts}, [](const BackendSpec& backend) {
        constexpr int kDead = 2;
        BackendSpec spec = backend;
        spec.doomed = {kDead};
        for (const ncclEpLayout_t layout : kLlLayouts) {
            expect_clean(spec, 4, std::nullopt, [=](RankContext& context) {
                const Problem problem = busy_problem(4, layout, 1);
                Group group(context, context.comm(), mask_config(context, problem, kNeverNs));
                Layer layer(context, group.get(), problem);
                degraded_step(context, group.get(), layer);
                RANK_CHECK(context, async_error(context, group.get()) == 0, "an error without a cause");
                if (context.rank() == kDead) raise(SIGKILL);
                for (int step = 0; step < 4; ++step) degraded_step(context, group.get(), layer);
                RANK_CHECK(context, query_mask(context, group.get()) == all_but(4, kDead),
                           "not exactly rank {} is masked", kDead);
                RANK_CHECK(context, async_error(context, group.get()) == 1, "no asynchronous error");
                check_diagnosis(context, group.get(), kDead);
                RANK_OK(context, ncclEpErrorClear(group.get()));
                RANK_CHECK(context, async_error(context, group.get()) == 0, "the error was not cleared");
                // Nobody waits for a masked rank.
                degraded_step(context, group.get(), layer);
                RANK_CHECK(context, async_error(context, group.get()) == 0, "a masked rank was waited for");
            });
        }
    });
}

TEST(Mask, SurvivorsOfAKillAtAnyStepGoOn) {
    on_each_backend({Backend::kSimulation}, [](const BackendSpec& backend) {
        constexpr int kRanks = 3;
        constexpr int kDead = 1;
        for (const ncclEpLayout_t layout : kLlLayouts) {
            const RankProgram program = [=](RankContext& context) {
                const Problem problem = busy_problem(kRanks, layout, 2);
                ncclEpGroupConfig_t config = mask_config(context, problem, 1'000'000);
                ncclEpGroup_t group = nullptr;
                // A rank that dies while groups are made takes the group along.
                if (create_group(context, &group, context.comm(), &config) != ncclSuccess) return;
                OwnedGroup owner(group);
                {
                    Layer layer(context, group, problem, {.peers_may_die = true});
                    for (int step = 0; step < 4; ++step) degraded_step(context, group, layer);
                }
                RANK_OK(context, ncclEpGroupDestroy(owner.release()));
            };
            harm_at_many_steps(backend, Harm::kKill, kRanks, kDead, seeds_or(0, 120), program);
        }
    });
}

// The last rank misses a dispatch. It is masked by the others, which go on, and comes back with ncclEpMaskClean; every
// second time it joins late: it has then done what it missed, alone. Real time goes by in each round.
void miss_and_come_back(RankContext& context, ncclEpLayout_t layout) {
    const int absent = context.num_ranks() - 1;
    const bool present = context.rank() != absent;
    const Problem problem = busy_problem(context.num_ranks(), layout, 3);
    Group group(context, context.comm(), mask_config(context, problem, short_timeout_ns(context)));
    Layer layer(context, group.get(), problem);
    layer.round_trip();
    for (int round = 0; round < (context.is_simulated() ? 4 : 2); ++round) {
        const bool joins_late = round % 2 == 1;
        if (present) {
            layer.prepare_dispatch();
            RANK_OK(context, layer.dispatch());
            layer.check_dispatch(NCCL_EP_FWD_PASS, all_but(context.num_ranks(), absent), true);
            RANK_CHECK(context, query_mask(context, group.get()) == all_but(context.num_ranks(), absent),
                       "the wrong ranks are masked");
            RANK_CHECK(context, async_error(context, group.get()) == 1, "no asynchronous error");
            layer.prepare_combine(all_but(context.num_ranks(), absent));
            RANK_OK(context, layer.combine());
            layer.check_combine(NCCL_EP_FWD_PASS, all_but(context.num_ranks(), absent));
        }
        context.barrier();
        if (!present && joins_late) {
            layer.prepare_dispatch();
            RANK_OK(context, layer.dispatch());
            RANK_OK(context, layer.combine());
            context.synchronize(layer.stream());
        }
        RANK_OK(context, ncclEpMaskClean(group.get(), layer.stream()));
        RANK_CHECK(context, query_mask(context, group.get()) == ActiveRanks(context.num_ranks(), 1),
                   "a rank is still masked");
        if (present)
            RANK_CHECK(context, async_error(context, group.get()) == 1, "the asynchronous error went with the masks");
        RANK_OK(context, ncclEpErrorClear(group.get()));
        layer.route(rerouted(problem, static_cast<uint64_t>(round) + 10, true));
        layer.round_trip();
        layer.route(busy_problem(context.num_ranks(), layout, static_cast<uint64_t>(round) + 20));
        layer.round_trip();
        RANK_CHECK(context, async_error(context, group.get()) == 0, "a step of healthy ranks timed out");
    }
}

TEST(Mask, ARankThatMissedAStepOrWasLateComesBack) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kLlLayouts) {
            expect_clean(spec, ranks_or(3), std::nullopt,
                         [=](RankContext& context) { miss_and_come_back(context, layout); });
        }
    });
}

// Masks set by hand: nobody waits, nothing is an error, and setting them back brings everybody back.
TEST(Mask, MasksAreSetByHandAndTakenBack) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (const ncclEpLayout_t layout : kLlLayouts) {
            expect_clean(spec, ranks_or(3), std::nullopt, [=](RankContext& context) {
                const int num_ranks = context.num_ranks();
                const int lonely = 0;
                const Problem problem = busy_problem(num_ranks, layout, 4);
                Group group(context, context.comm(), mask_config(context, problem, 60'000'000'000));
                Layer layer(context, group.get(), problem);
                // The others leave rank 0 out, and it leaves out all others.
                ActiveRanks active = all_but(num_ranks, lonely);
                if (context.rank() == lonely) {
                    for (int& entry : active) entry = 1 - entry;
                }
                for (int round = 0; round < 3; ++round) {
                    // Any value but 0 means active, and the array may be reused at once.
                    std::vector<int> values = active;
                    for (int& value : values) value *= 5;
                    RANK_OK(context, ncclEpMaskUpdate(group.get(), values.data(), layer.stream()));
                    std::fill(values.begin(), values.end(), 3);
                    context.synchronize(layer.stream());
                    RANK_CHECK(context, query_mask(context, group.get()) == active, "the mask is another one");
                    context.barrier();
                    degraded_step(context, group.get(), layer);
                    RANK_CHECK(context, query_mask(context, group.get()) == active, "a step changed the mask");
                    RANK_OK(context, ncclEpMaskUpdate(group.get(), ActiveRanks(num_ranks, 1).data(), layer.stream()));
                    context.synchronize(layer.stream());
                    context.barrier();
                    layer.round_trip();
                    RANK_CHECK(context, async_error(context, group.get()) == 0, "somebody timed out");
                }
            });
        }
    });
}

TEST(Mask, CleaningWorksBeforeAnyHandle) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const Problem problem = busy_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 5);
            Group group(context, context.comm(), mask_config(context, problem, 60'000'000'000));
            RANK_OK(context, ncclEpMaskClean(group.get(), context.make_stream()));
            Layer layer(context, group.get(), problem);
            layer.round_trip();
        });
    });
}

TEST(Mask, FunctionsAreRefusedWithoutMasksAndWithoutPointers) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const Problem problem = busy_problem(context.num_ranks(), NCCL_EP_LAYOUT_EXPERT_MAJOR, 6);
            const cudaStream_t stream = context.make_stream();
            Group without(context, problem);
            Group with(context, context.comm(), mask_config(context, problem, 60'000'000'000));
            int error = 33;
            std::vector<int> mask(context.num_ranks(), 1);
            RANK_REFUSED(context, ncclInvalidUsage, "enable_mask", ncclEpMaskQuery(without.get(), mask.data(), stream));
            RANK_REFUSED(context, ncclInvalidUsage, "enable_mask",
                         ncclEpMaskUpdate(without.get(), mask.data(), stream));
            RANK_REFUSED(context, ncclInvalidUsage, "enable_mask", ncclEpMaskClean(without.get(), stream));
            RANK_REFUSED(context, ncclInvalidUsage, "enable_mask", ncclEpGetAsyncError(without.get(), &error));
            RANK_REFUSED(context, ncclInvalidUsage, "enable_mask", ncclEpErrorClear(without.get()));
            RANK_REFUSED(context, ncclInvalidArgument, "group", ncclEpMaskQuery(nullptr, mask.data(), stream));
            RANK_REFUSED(context, ncclInvalidArgument, "group", ncclEpMaskUpdate(nullptr, mask.data(), stream));
            RANK_REFUSED(context, ncclInvalidArgument, "group", ncclEpMaskClean(nullptr, stream));
            RANK_REFUSED(context, ncclInvalidArgument, "group", ncclEpGetAsyncError(nullptr, &error));
            RANK_REFUSED(context, ncclInvalidArgument, "group", ncclEpErrorClear(nullptr));
            RANK_REFUSED(context, ncclInvalidArgument, "mask", ncclEpMaskQuery(with.get(), nullptr, stream));
            RANK_REFUSED(context, ncclInvalidArgument, "mask", ncclEpMaskUpdate(with.get(), nullptr, stream));
            RANK_REFUSED(context, ncclInvalidArgument, "error", ncclEpGetAsyncError(with.get(), nullptr));
            RANK_CHECK(context, error == 33, "a refused call wrote {}", error);
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
