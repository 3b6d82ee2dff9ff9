// SPDX-License-Identifier: Apache-2.0
// High throughput: a rank that does not answer ends every wait of the others within the timeout, in every phase, with
// ncclRemoteError and its name, never with that of another one that waits for it, too.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>

#include "conformance/ht/random_problem.h"
#include "conformance/support/fault_support.h"

namespace crossdock::testing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kTimeoutNs = 700'000'000;

// Every rank sends to every other.
HtProblem busy_ht_problem(int num_ranks, ncclEpLayout_t layout, uint64_t seed) {
    HtProblem problem;
    static_cast<Problem&>(problem) = busy_problem(num_ranks, layout, seed);
    problem.alignment = layout == NCCL_EP_LAYOUT_EXPERT_MAJOR ? 4 : 1;
    problem.budget = problem.most_rows();
    return problem;
}

ncclEpGroupConfig_t short_config(RankContext& context, const HtProblem& problem, uint64_t timeout_ns = kTimeoutNs) {
    ncclEpGroupConfig_t config = group_config_for(context, problem);
    config.timeout_ns = timeout_ns;
    return config;
}

// After the first failure: every further call says the same at once. Returns whom this rank blames.
int check_failed_group(RankContext& context, HtLayer& layer, ncclEpGroup_t group) {
    const int blamed = diagnosed_peer(context, group);
    crossdockDiagnosis_t diagnosis = CROSSDOCK_DIAGNOSIS_INIT;
    RANK_OK(context, crossdockGroupDiagnosis(group, &diagnosis));
    // Numbers of operations and packets, of which there are few here; packed words would be larger.
    RANK_CHECK(context, diagnosis.expected < 1000 && diagnosis.seen < 1000, "step {}: expected {}, saw {}",
               diagnosis.step, diagnosis.expected, diagnosis.seen);
    const std::string name = fmt::format("rank {}", blamed);
    RANK_REFUSED(context, ncclRemoteError, name, layer.update());
    RANK_REFUSED(context, ncclRemoteError, name, layer.dispatch());
    RANK_REFUSED(context, ncclRemoteError, name, layer.combine());
    RANK_REFUSED(context, ncclRemoteError, name, layer.dispatch(NCCL_EP_BWD_PASS));
    return blamed;
}

// The phases of a training step.
constexpr int kPhases = 5;
ncclResult_t run_phase(HtLayer& layer, int phase) {
    switch (phase) {
        case 0:
            return layer.update();
        case 1:
            return layer.dispatch();
        case 2:
            return layer.combine();
        case 3:
            return layer.dispatch(NCCL_EP_BWD_PASS);
        default:
            return layer.combine(NCCL_EP_BWD_PASS);
    }
}

void prepare_all(HtLayer& layer) {
    layer.prepare_update();
    layer.prepare_dispatch();
    layer.prepare_combine();
}

// Killed before any phase; with a long timeout, too, which nobody waits for, since the process's end is known at once.
TEST(HtFault, AKilledProcessIsNamedByAllSurvivors) {
    on_each_backend({Backend::kProcesses, Backend::kHosts}, [](const BackendSpec& backend) {
        for (int round = 0; round < 2 * kPhases; ++round) {
            const int num_ranks = 3 + round % 2;
            const int dead = round % num_ranks;
            BackendSpec spec = backend;
            spec.doomed = {dead};
            BlameTable blames;
            expect_clean(spec, num_ranks, std::nullopt, [=, &blames](RankContext& context) {
                const HtProblem problem =
                    busy_ht_problem(num_ranks, kHtLayouts[round / kPhases], static_cast<uint64_t>(round));
                Group group(context, context.comm(),
                            short_config(context, problem, round % 2 == 0 ? kTimeoutNs : 100'000'000'000));
                HtLayer layer(context, group.get(), problem);
                layer.round_trip();
                prepare_all(layer);
                for (int phase = 0; true; phase = (phase + 1) % kPhases) {
                    if (context.rank() == dead && phase == round % kPhases) raise(SIGKILL);
                    const auto begin = Clock::now();
                    const ncclResult_t result = run_phase(layer, phase);
                    const double elapsed_s = std::chrono::duration<double>(Clock::now() - begin).count();
                    if (result == ncclSuccess) continue;
                    RANK_CHECK(context, result == ncclRemoteError, "{}: {}", result_name(result),
                               crossdockGetLastError());
                    // With room for a loaded machine.
                    RANK_CHECK(context, elapsed_s < 2 * kTimeoutNs * 1e-9 + 5, "the failing call took {} s", elapsed_s);
                    break;
                }
                blames.blame(context.rank(), check_failed_group(context, layer, group.get()));
            });
            EXPECT_EQ(blames.complaint_about_names(num_ranks, dead, true), "");
        }
    });
    EXPECT_EQ(left_in_shared_memory(), std::vector<std::string>());
}

// What the survivors of a killed rank do until they notice; returns whether they have.
bool steps_until_failure(RankContext& context, HtLayer& layer, bool dead, BlameTable& blames, ncclEpGroup_t group) {
    const auto failed = [&](ncclResult_t result) {
        if (result == ncclSuccess) return false;
        RANK_CHECK(context, dead || result == ncclRemoteError, "{}: {}", result_name(result), crossdockGetLastError());
        if (!dead) blames.blame(context.rank(), check_failed_group(context, layer, group));
        return true;
    };
    for (int step = 0; step < 2; ++step) {
        layer.refill(rerouted(layer.problem(), static_cast<uint64_t>(step), true));
        layer.prepare_update();
        if (failed(layer.update())) return true;
        if (!dead) layer.check_update();
        for (const ncclEpPassDir_t direction : {NCCL_EP_FWD_PASS, NCCL_EP_BWD_PASS}) {
            layer.prepare_dispatch();
            if (failed(layer.dispatch(direction))) return true;
            if (!dead) layer.check_dispatch(direction);
            layer.prepare_combine();
            if (failed(layer.combine(direction))) return true;
            if (!dead) layer.check_combine(direction);
        }
    }
    return false;
}

// One rank's run of a backend in which rank `dead` is killed.
void live_with_the_dead(RankContext& context, ncclEpLayout_t layout, int dead_rank, BlameTable& blames) {
    const bool dead = context.rank() == dead_rank;
    const HtProblem problem = busy_ht_problem(context.num_ranks(), layout, 4);
    ncclEpGroupConfig_t config = short_config(context, problem, 1'000'000);
    ncclEpGroup_t group = nullptr;
    const ncclResult_t made = create_group(context, &group, context.comm(), &config);
    if (made != ncclSuccess) {
        RANK_CHECK(context, dead || made == ncclRemoteError, "{}: {}", result_name(made), crossdockGetLastError());
        RANK_CHECK(context, group == nullptr, "a group that was not made");
        blames.blame(context.rank(), dead_rank);  // there is no group to ask
        return;
    }
    OwnedGroup owner(group);
    {
        HtLayer layer(context, group, problem, {.without_update = true});
        steps_until_failure(context, layer, dead, blames, group);
    }
    const ncclResult_t gone = ncclEpGroupDestroy(owner.release());
    RANK_CHECK(context, dead || gone == ncclSuccess, "{}: {}", result_name(gone), crossdockGetLastError());
}

// As fibers, killed at many steps: whatever the moment, the others end, and say who it was.
TEST(HtFault, ARankKilledAtAnyStepIsNamed) {
    on_each_backend({Backend::kSimulation}, [](const BackendSpec& backend) {
        const int num_ranks = ranks_or(3);
        constexpr int kDead = 1;
        for (const ncclEpLayout_t layout : kHtLayouts) {
            const auto blames = std::make_shared<BlameTable>();
            const RankProgram program = [=](RankContext& context) {
                live_with_the_dead(context, layout, kDead, *blames);
            };
            BackendSpec spec = backend;
            const RunReport healthy = expect_clean(spec, num_ranks, 0, program);
            ASSERT_GT(healthy.num_steps, 0u);
            const Seeds seeds = seeds_or(0, 1000);
            for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
                spec.deterministic.seed = seed;
                spec.deterministic.killed_rank = kDead;
                spec.deterministic.killed_at_step = reference::random_bits(seed, 1) % (healthy.num_steps + 1);
                blames->clear();
                RunReport report = run_ranks(spec, num_ranks, program);
                const std::string complaint = blames->complaint_about_names(num_ranks, kDead, false);
                if (!complaint.empty()) report.failures.push_back(complaint);
                for (const std::string& failure : failures_of_others(report, kDead)) {
                    ADD_FAILURE() << failure << "\nkilled at step " << spec.deterministic.killed_at_step << " of "
                                  << healthy.num_steps << "\nreplay: " << replay_line(spec.kind, num_ranks, seed);
                }
                if (::testing::Test::HasFailure()) return;
            }
        }
    });
}

// A rank that lives but stays away counts as one that does not answer, whatever it misses.
TEST(HtFault, ARankThatStaysAwayFailsTheGroup) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        for (int missed = 0; missed < kPhases; ++missed) {
            expect_clean(spec, ranks_or(3), std::nullopt, [=](RankContext& context) {
                const int absent = context.num_ranks() - 1;
                const HtProblem problem = busy_ht_problem(context.num_ranks(), kHtLayouts[missed % 2], 5);
                Group group(context, context.comm(), short_config(context, problem, 300'000'000));
                HtLayer layer(context, group.get(), problem);
                layer.round_trip();
                prepare_all(layer);
                if (context.rank() != absent) {
                    const ncclResult_t result = run_phase(layer, missed);
                    context.synchronize(layer.stream());
                    RANK_CHECK(context, result == ncclRemoteError || context.is_gpu(), "{}", result_name(result));
                    RANK_CHECK(context, check_failed_group(context, layer, group.get()) == absent,
                               "the wrong rank is blamed in phase {}", missed);
                }
                context.barrier();
            });
        }
    });
}

// Below a millisecond the timeout keeps its value, in every phase. In simulated time only: it also bounds the making of
// the group, which a loaded machine does not do that fast.
TEST(HtFault, TimeoutsBelowAMillisecondKeepTheirValue) {
    on_each_backend({Backend::kSimulation}, [](const BackendSpec& spec) {
        for (const uint64_t timeout_us : {80, 999}) {
            for (int missed = 0; missed < kPhases; ++missed) {
                expect_clean(spec, 2, std::nullopt, [=](RankContext& context) {
                    const HtProblem problem = busy_ht_problem(2, kHtLayouts[missed % 2], 6);
                    Group group(context, context.comm(), short_config(context, problem, timeout_us * 1000));
                    HtLayer layer(context, group.get(), problem);
                    prepare_all(layer);
                    if (context.rank() == 0) {
                        RANK_CHECK(context, run_phase(layer, missed) == ncclRemoteError, "rank 1 was not there");
                        crossdockDiagnosis_t diagnosis = CROSSDOCK_DIAGNOSIS_INIT;
                        RANK_OK(context, crossdockGroupDiagnosis(group.get(), &diagnosis));
                        RANK_CHECK(context, diagnosis.elapsed_us >= timeout_us && diagnosis.elapsed_us < 2 * timeout_us,
                                   "waited {} us instead of {}", diagnosis.elapsed_us, timeout_us);
                        constexpr const char* kOperations[kPhases] = {"update", "dispatch", "combine", "dispatch",
                                                                      "combine"};
                        RANK_CHECK(context, std::string(diagnosis.operation) == kOperations[missed],
                                   "the operation is called {}", diagnosis.operation);
                    }
                    context.barrier();
                });
            }
        }
    });
}

// Nobody waited in vain: nothing to tell.
TEST(HtFault, AHealthyGroupHasNoDiagnosis) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const HtProblem problem = busy_ht_problem(context.num_ranks(), NCCL_EP_LAYOUT_FLAT, 8);
            Group group(context, problem);
            HtLayer(context, group.get(), problem).round_trip();
            crossdockDiagnosis_t diagnosis = CROSSDOCK_DIAGNOSIS_INIT;
            diagnosis.valid = 7;
            RANK_OK(context, crossdockGroupDiagnosis(group.get(), &diagnosis));
            RANK_CHECK(context, diagnosis.valid == 0 && diagnosis.epoch == 0, "valid {}", diagnosis.valid);
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
