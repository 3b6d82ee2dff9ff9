// SPDX-License-Identifier: Apache-2.0
// Without masks, a rank that does not answer ends every wait of the others within the timeout, in every phase of a
// step, with ncclRemoteError and its name.
#include <signal.h>
#include <unistd.h>

#include "conformance/support/fault_support.h"
#include "conformance/support/modes.h"
#include "conformance/support/with_lsa_team.h"

namespace crossdock::testing {
namespace {

ncclEpGroupConfig_t config_with(RankContext& context, const Problem& problem, uint64_t timeout_ns) {
    ncclEpGroupConfig_t config = group_config_for(context, problem);
    config.timeout_ns = timeout_ns;
    return config;
}

// After the first failure: every further call says the same at once. Returns the rank that this one names as lost.
int check_failed_group(RankContext& context, Layer& layer, ncclEpGroup_t group) {
    const int lost = diagnosed_peer(context, group);
    crossdockDiagnosis_t diagnosis = CROSSDOCK_DIAGNOSIS_INIT;
    RANK_OK(context, crossdockGroupDiagnosis(group, &diagnosis));
    // Numbers of operations and packets, of which there are few here; packed words would be larger.
    RANK_CHECK(context, diagnosis.expected < 1000 && diagnosis.seen < 1000, "step {}: expected {}, saw {}",
               diagnosis.step, diagnosis.expected, diagnosis.seen);
    const std::string name = fmt::format("rank {}", lost);
    for (int phase = 0; phase < num_phases(layer.problem().algorithm); ++phase)
        RANK_REFUSED(context, ncclRemoteError, name, run_phase(layer, phase));
    return lost;
}

// High throughput never names another one that waits for the dead; low latency may, if that leads to the dead.
std::string complaint(ncclEpAlgorithm_t mode, const LostRanks& lost_ranks, int num_ranks, int dead, bool everybody) {
    return is_ht(mode) ? lost_ranks.complaint_about_names(num_ranks, dead, everybody)
                       : lost_ranks.complaint(num_ranks, dead, everybody);
}

// Killed before any phase. Its end is known at once, whatever the timeout.
TEST_BOTH_MODES(Fault, AKilledProcessIsNamedByAllSurvivors) {
    on_each_backend({Backend::kProcesses, Backend::kHosts}, [=](const BackendSpec& backend) {
        const int phases = num_phases(mode);
        for (int round = 0; round < 2 * phases; ++round) {
            const int num_ranks = 3 + round % 2;
            const int dead = round % num_ranks;
            BackendSpec spec = backend;
            spec.doomed = {dead};
            LostRanks lost_ranks;
            expect_clean(spec, num_ranks, std::nullopt, [=, &lost_ranks](RankContext& context) {
                const Problem problem =
                    busy_problem(num_ranks, layouts_of(mode)[round / phases], static_cast<uint64_t>(round), mode);
                Group group(context, context.comm(), config_with(context, problem, kNeverNs));
                Layer layer(context, group.get(), problem);
                layer.round_trip();
                for (int phase = 0; phase < phases; ++phase) prepare_phase(layer, phase);
                for (int phase = 0; true; phase = (phase + 1) % phases) {
                    if (context.rank() == dead && phase == round % phases) raise(SIGKILL);
                    const ncclResult_t result = run_phase(layer, phase);
                    if (result == ncclSuccess) continue;
                    RANK_CHECK(context, result == ncclRemoteError, "{}: {}", result_name(result),
                               crossdockGetLastError());
                    break;
                }
                lost_ranks.note(context.rank(), check_failed_group(context, layer, group.get()));
                // In high throughput most ranks hear it from another one.
                if (!is_ht(mode)) RANK_REFUSED(context, ncclRemoteError, "process", run_phase(layer, 0));
            });
            EXPECT_EQ(complaint(mode, lost_ranks, num_ranks, dead, true), "");
        }
    });
    EXPECT_EQ(left_in_shared_memory(), std::vector<std::string>());
}

// What the survivors of a killed rank do until they notice.
void step_until_failure(RankContext& context, Layer& layer, bool dead, LostRanks& lost_ranks, ncclEpGroup_t group) {
    const ncclEpAlgorithm_t mode = layer.problem().algorithm;
    for (uint64_t step = 0; step < (is_ht(mode) ? 2 : 3); ++step) {
        if (is_ht(mode)) layer.refill(rerouted(layer.problem(), step, true));
        for (int phase = 0; phase < num_phases(mode); ++phase) {
            prepare_phase(layer, phase);
            const ncclResult_t result = run_phase(layer, phase);
            if (result != ncclSuccess) {
                RANK_CHECK(context, dead || result == ncclRemoteError, "{}: {}", result_name(result),
                           crossdockGetLastError());
                if (!dead) lost_ranks.note(context.rank(), check_failed_group(context, layer, group));
                return;
            }
            if (!dead) check_phase(layer, phase);
        }
    }
}

// One rank's run of a backend in which rank `dead` is killed.
void live_with_the_dead(RankContext& context, ncclEpAlgorithm_t mode, ncclEpLayout_t layout, int dead_rank,
                        LostRanks& lost_ranks) {
    const bool dead = context.rank() == dead_rank;
    const Problem problem = busy_problem(context.num_ranks(), layout, 4, mode);
    const ncclEpGroupConfig_t config = config_with(context, problem, 1'000'000);
    ncclEpGroup_t group = nullptr;
    const ncclResult_t made = create_group(context, &group, context.comm(), &config);
    if (made != ncclSuccess) {
        RANK_CHECK(context, dead || made == ncclRemoteError, "{}: {}", result_name(made), crossdockGetLastError());
        RANK_CHECK(context, group == nullptr, "a group that was not made");
        lost_ranks.note(context.rank(), dead_rank);  // there is no group to ask
        return;
    }
    OwnedGroup owner(group);
    {
        const LayerOptions options{.without_update = is_ht(mode), .peers_may_die = true};
        Layer layer(context, group, problem, options);
        step_until_failure(context, layer, dead, lost_ranks, group);
    }
    const ncclResult_t gone = ncclEpGroupDestroy(owner.release());
    RANK_CHECK(context, dead || gone == ncclSuccess, "{}: {}", result_name(gone), crossdockGetLastError());
}

// As fibers, killed at many steps: whatever the moment, the others end, and say who it was.
TEST_BOTH_MODES(Fault, ARankKilledAtAnyStepIsNamed) {
    on_each_backend({Backend::kSimulation}, [=](const BackendSpec& backend) {
        const int num_ranks = ranks_or(3);
        constexpr int kDead = 1;
        for (const ncclEpLayout_t layout : layouts_of(mode)) {
            const auto lost_ranks = std::make_shared<LostRanks>();
            const RankProgram program = [=](RankContext& context) {
                live_with_the_dead(context, mode, layout, kDead, *lost_ranks);
            };
            const auto look = [&](std::vector<std::string>& failures) {
                const std::string complained = complaint(mode, *lost_ranks, num_ranks, kDead, false);
                if (!complained.empty()) failures.push_back(complained);
                lost_ranks->clear();
            };
            harm_at_many_steps(backend, Harm::kKill, num_ranks, kDead, seeds_or(0, is_ht(mode) ? 1000 : 120), program,
                               look);
        }
    });
}

// Who is behind a cut cable is named by everybody within the timeout. High throughput, in a node of two ranks with a
// cable each: both ends of the cut report the other one, and the neighbour believes who comes first: it names one whom
// rank 1 names, or rank 1.
TEST_BOTH_MODES(LsaTeam, ACutCableIsNamed) {
    on_each_backend({Backend::kSimulation}, [=](const BackendSpec& backend) {
        constexpr int kRanks = 4;
        constexpr int kCut = 1;
        for (const int lsa_team_size : {1, 2}) {
            const WithLsaTeam team(lsa_team_size);
            for (const ncclEpLayout_t layout : layouts_of(mode)) {
                LostRanks lost_ranks;
                const RankProgram program = [&](RankContext& context) {
                    const Problem problem = busy_problem(kRanks, layout, 5, mode);
                    Group group(context, context.comm(), config_with(context, problem, 1'000'000));
                    Layer layer(context, group.get(), problem, {.without_update = is_ht(mode)});
                    for (int operation = 0; operation < 3 * num_phases(mode); ++operation) {
                        const int phase = operation % num_phases(mode);
                        prepare_phase(layer, phase);
                        const ncclResult_t result = run_phase(layer, phase);
                        if (result == ncclSuccess) {
                            check_phase(layer, phase);
                            continue;
                        }
                        RANK_CHECK(context, result == ncclRemoteError, "{}: {}", result_name(result),
                                   crossdockGetLastError());
                        const int peer = diagnosed_peer(context, group.get());
                        crossdockDiagnosis_t diagnosis = CROSSDOCK_DIAGNOSIS_INIT;
                        RANK_OK(context, crossdockGroupDiagnosis(group.get(), &diagnosis));
                        const bool is_told = diagnosis.step == std::string("report");
                        const bool has_cut = is_ht(mode) && is_told && diagnosis.seen == kCut && lsa_team_size > 1;
                        lost_ranks.note(context.rank(), has_cut ? kCut : peer);
                        return;
                    }
                };
                const Seeds seeds = seeds_or(0, is_ht(mode) ? 40 : 75);
                uint64_t num_named = 0;
                harm_at_many_steps(backend, Harm::kCut, kRanks, kCut, seeds, program,
                                   [&](std::vector<std::string>& failures) {
                                       const std::string complained = lost_ranks.complaint(kRanks, kCut, false);
                                       if (!complained.empty()) failures.push_back(complained);
                                       num_named += lost_ranks.has_any() ? 1 : 0;
                                       lost_ranks.clear();
                                   });
                EXPECT_GT(num_named, seeds.count / 2);
            }
        }
    });
}

// A rank that lives but stays away counts as one that does not answer, whatever it misses.
TEST_BOTH_MODES(Fault, ARankThatStaysAwayFailsTheGroup) {
    on_each_backend(kEveryBackend, [=](const BackendSpec& spec) {
        for (int missed = 0; missed < num_phases(mode); ++missed) {
            expect_clean(spec, ranks_or(3), std::nullopt, [=](RankContext& context) {
                const int absent = context.num_ranks() - 1;
                const Problem problem = busy_problem(context.num_ranks(), layouts_of(mode)[missed % 2], 5, mode);
                Group group(context, context.comm(), config_with(context, problem, short_timeout_ns(context)));
                Layer layer(context, group.get(), problem);
                layer.round_trip();
                for (int phase = 0; phase < num_phases(mode); ++phase) prepare_phase(layer, phase);
                if (context.rank() != absent) {
                    const ncclResult_t result = run_phase(layer, missed);
                    context.synchronize(layer.stream());
                    RANK_CHECK(context, result == ncclRemoteError || context.is_gpu(), "{}", result_name(result));
                    RANK_CHECK(context, check_failed_group(context, layer, group.get()) == absent,
                               "the wrong rank is named in phase {}", missed);
                }
                context.barrier();
            });
        }
    });
}

// In these tests, not elsewhere, a rank that gets no core for longer than the timeout is not lost.
TEST_BOTH_MODES(Fault, ShortTimeoutsHereArePatient) {
    on_each_backend({Backend::kProcesses, Backend::kHosts, Backend::kThreads}, [=](const BackendSpec& spec) {
        expect_clean(spec, 3, std::nullopt, [=](RankContext& context) {
            const Problem problem = busy_problem(3, layouts_of(mode)[0], 9, mode);
            Group group(context, context.comm(), config_with(context, problem, short_timeout_ns(context)));
            Layer layer(context, group.get(), problem);
            if (context.rank() == 1) usleep(3 * static_cast<useconds_t>(short_timeout_ns(context) / 1000));
            layer.round_trip();
        });
    });
}

// Below a millisecond the timeout keeps its value; it is neither rounded to zero nor to the default. In simulated time
// only, which is exact.
TEST_BOTH_MODES(Fault, TimeoutsBelowAMillisecondKeepTheirValue) {
    on_each_backend({Backend::kSimulation}, [=](const BackendSpec& spec) {
        for (const uint64_t timeout_us : {80, 400, 999}) {
            // A low-latency combine needs a dispatch before.
            for (int missed = 0; missed < (is_ht(mode) ? num_phases(mode) : 1); ++missed) {
                expect_clean(spec, 2, std::nullopt, [=](RankContext& context) {
                    const Problem problem = busy_problem(2, layouts_of(mode)[missed % 2], 6, mode);
                    Group group(context, context.comm(), config_with(context, problem, timeout_us * 1000));
                    Layer layer(context, group.get(), problem);
                    for (int phase = 0; phase < num_phases(mode); ++phase) prepare_phase(layer, phase);
                    if (context.rank() == 0) {
                        RANK_CHECK(context, run_phase(layer, missed) == ncclRemoteError, "rank 1 was not there");
                        crossdockDiagnosis_t diagnosis = CROSSDOCK_DIAGNOSIS_INIT;
                        RANK_OK(context, crossdockGroupDiagnosis(group.get(), &diagnosis));
                        RANK_CHECK(context, diagnosis.elapsed_us >= timeout_us && diagnosis.elapsed_us < 2 * timeout_us,
                                   "waited {} us instead of {}", diagnosis.elapsed_us, timeout_us);
                        RANK_CHECK(context, std::string(diagnosis.operation) == phases_of(mode)[missed].name(),
                                   "the operation is called {}", diagnosis.operation);
                    }
                    context.barrier();
                });
            }
        }
    });
}

// Nobody timed out: nothing to tell.
TEST_BOTH_MODES(Fault, AHealthyGroupHasNoDiagnosis) {
    on_each_backend(kEveryBackend, [=](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [=](RankContext& context) {
            const Problem problem = busy_problem(context.num_ranks(), layouts_of(mode)[0], 8, mode);
            Group group(context, problem);
            Layer(context, group.get(), problem).round_trip();
            crossdockDiagnosis_t diagnosis = CROSSDOCK_DIAGNOSIS_INIT;
            diagnosis.valid = 7;
            RANK_OK(context, crossdockGroupDiagnosis(group.get(), &diagnosis));
            RANK_CHECK(context, diagnosis.valid == 0 && diagnosis.epoch == 0, "valid {}", diagnosis.valid);
            diagnosis.magic = 1;
            RANK_REFUSED(context, ncclInvalidArgument, "magic", crossdockGroupDiagnosis(group.get(), &diagnosis));
            RANK_REFUSED(context, ncclInvalidArgument, "diagnosis", crossdockGroupDiagnosis(group.get(), nullptr));
            RANK_REFUSED(context, ncclInvalidArgument, "group", crossdockGroupDiagnosis(nullptr, &diagnosis));
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
