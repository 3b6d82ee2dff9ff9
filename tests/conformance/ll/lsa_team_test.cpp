// SPDX-License-Identifier: Apache-2.0
// Groups of several LSA teams (nodes) do what groups of one do, to the bit, over a network that reorders what
// it can; and they count what crosses.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <set>

#include "conformance/support/fault_support.h"
#include "conformance/support/with_lsa_team.h"

namespace crossdock::testing {
namespace {

RankProgram round_trips(const Problem& problem) {
    return [problem](RankContext& context) {
        Group group(context, problem);
        RANK_CHECK(context, traffic_of(context, group.get()).lsa_team_size == lsa_team_for(context.num_ranks()),
                   "teams of {} ranks", traffic_of(context, group.get()).lsa_team_size);
        Layer layer(context, group.get(), problem);
        layer.round_trip();
        layer.route(rerouted(problem, problem.seed + 1000));
        layer.round_trip();
    };
}

// 1 x 8, 2 x 4, 4 x 2 and 8 x 1 are the same to a caller.
TEST(LsaTeam, EveryShapeGivesTheSameBits) {
    on_each_backend(kCpuBackends, [](const BackendSpec& spec) {
        const uint64_t num_seeds = seeds_or(71, 6).count;
        for (uint64_t seed = 71; seed < 71 + num_seeds; ++seed) {
            Problem problem = random_problem(seed, {.num_ranks = 8, .most_row_bytes = 1024});
            problem.layout = seed % 2 == 0 ? NCCL_EP_LAYOUT_EXPERT_MAJOR : NCCL_EP_LAYOUT_RANK_MAJOR;
            problem.asks_as_v1 = problem.asks_as_v1 && problem.expert_major();
            problem.sums = seed % 4 == 0 ? CROSSDOCK_SUMS_SENDER : CROSSDOCK_SUMS_EXACT;
            std::vector<uint64_t> first;
            for (const int lsa_team_size : {8, 4, 2, 1}) {
                const WithLsaTeam team(lsa_team_size);
                const RunReport report = expect_clean(spec, 8, seed, round_trips(problem));
                if (first.empty()) first = report.digests;
                EXPECT_EQ(report.digests, first) << "teams of " << lsa_team_size << ", " << problem.describe();
            }
        }
    });
}

// What one rank's dispatch and combine put, from its routing.
struct Expected {
    crossdockTraffic_t traffic = CROSSDOCK_TRAFFIC_INIT;

    Expected(const Problem& problem, int rank, int lsa_team_size) {
        const int first = rank / lsa_team_size * lsa_team_size;
        const auto is_gin_peer = [&](int peer) { return peer < first || peer >= first + lsa_team_size; };
        const uint64_t row_bytes = problem.token_row_bytes();
        const bool has_gin_peers = lsa_team_size < problem.num_ranks;  // then a header also tells where rows return
        const uint64_t header_bytes = 16 * (1 + static_cast<uint64_t>(problem.num_topk) + (has_gin_peers ? 1 : 0));
        const uint64_t outbox_rows = static_cast<uint64_t>(problem.max_tokens) * problem.num_topk;
        uint64_t returned = 0;  // to the GIN peers before
        const int experts = problem.num_experts / problem.num_ranks;
        traffic.lsa_team_size = lsa_team_size;
        for (int source = 0; source < problem.num_ranks; ++source) {
            const reference::RankInput& input = problem.ranks[source];
            std::vector<std::set<int>> tokens(problem.num_ranks);  // of each rank
            for (size_t i = 0; i < input.ids.size(); ++i)
                tokens[input.ids[i] / experts].insert(static_cast<int>(i) / problem.num_topk);
            for (int peer = 0; source == rank && peer < problem.num_ranks; ++peer) {
                const uint64_t rows = tokens[peer].size();
                if (!is_gin_peer(peer)) {
                    traffic.rows_inside += rows;
                    traffic.bytes_inside += rows * (row_bytes + header_bytes);
                    continue;
                }
                // It has come to the dispatch and to the combine, with these terms.
                traffic.puts += 2;
                traffic.bytes_crossed += 2 * (16 + 8);
                traffic.rows_crossed += rows;
                traffic.puts += rows > 0 ? 2 : 1;  // rows with headers, count with the signal behind them
                traffic.bytes_crossed += rows * (row_bytes + header_bytes) + 8 + 8;
            }
            const uint64_t back = tokens[rank].size();
            if (!is_gin_peer(source)) {
                traffic.rows_inside += back;
                traffic.bytes_inside += back * row_bytes;
            } else if (back > 0) {
                traffic.rows_crossed += back;
                // Rows, in parts if the outbox is full between them, and which operation they are of, with the signal.
                traffic.puts += (returned + back - 1) / outbox_rows - returned / outbox_rows + 1 + 1;
                traffic.bytes_crossed += back * (16 + row_bytes) + 8 + 8;
                returned += back;
            }
        }
    }
};

// Bytes and messages are those of the model in docs/scaling.md.
TEST(LsaTeam, TrafficIsWhatTheModelSays) {
    on_each_backend(kCpuBackends, [](const BackendSpec& spec) {
        for (const int lsa_team_size : {1, 2, 3, 6}) {
            const WithLsaTeam team(lsa_team_size);
            Problem problem = busy_problem(6, NCCL_EP_LAYOUT_RANK_MAJOR, 8);
            problem.num_topk = 2;
            problem = rerouted(problem, 5);
            // Rank 4 has nothing to send, and no choice is dropped.
            Random random(7);
            for (reference::RankInput& input : problem.ranks) {
                for (auto& id : input.ids) id = random.below(problem.num_experts - 4);
            }
            problem.ranks[4].num_tokens = 0;
            problem.ranks[4].ids.clear();
            problem.ranks[4].weights.clear();
            expect_clean(spec, 6, std::nullopt, [=](RankContext& context) {
                Group group(context, problem);
                Layer layer(context, group.get(), problem);
                layer.round_trip();
                crossdockTraffic_t expected = Expected(problem, context.rank(), lsa_team_size).traffic;
                if (lsa_team_size == 6) expected.rows_inside = expected.bytes_inside = 0;  // one team counts nothing
                const crossdockTraffic_t seen = traffic_of(context, group.get());
                RANK_CHECK(context, seen.lsa_team_size == lsa_team_size, "{}", seen.lsa_team_size);
                RANK_CHECK(context, seen.rows_inside == expected.rows_inside, "{}, expected {}", seen.rows_inside,
                           expected.rows_inside);
                RANK_CHECK(context, seen.bytes_inside == expected.bytes_inside, "{}, expected {}", seen.bytes_inside,
                           expected.bytes_inside);
                RANK_CHECK(context, seen.rows_crossed == expected.rows_crossed, "{}, expected {}", seen.rows_crossed,
                           expected.rows_crossed);
                RANK_CHECK(context, seen.bytes_crossed == expected.bytes_crossed, "{}, expected {}", seen.bytes_crossed,
                           expected.bytes_crossed);
                RANK_CHECK(context, seen.puts == expected.puts, "{}, expected {}", seen.puts, expected.puts);
                RANK_CHECK(context, seen.signals == expected.signals, "{}, expected {}", seen.signals,
                           expected.signals);
            });
        }
    });
}

// Rank r has num_tokens[r] tokens, each with an expert on each rank or, `to_first`, two on rank 0.
Problem with_tokens(Problem problem, const std::vector<int>& num_tokens, bool to_first) {
    const int experts = problem.num_experts / problem.num_ranks;
    for (int rank = 0; rank < problem.num_ranks; ++rank) {
        reference::RankInput& input = problem.ranks[rank];
        input.num_tokens = num_tokens[rank];
        input.ids.clear();
        for (int i = 0; i < input.num_tokens * problem.num_topk; ++i) {
            const int k = i % problem.num_topk;
            input.ids.push_back(to_first ? (k < experts ? k : -1) : k * experts);
        }
        input.weights.assign(input.ids.size(), 0.5f);
    }
    return problem;
}

// The number of puts does not depend on the number of tokens, unless more rows return to GIN peers than the outbox
// holds: then it is higher by one for each time that the outbox is full.
TEST(LsaTeam, PutsDoNotGrowWithTokens) {
    constexpr int kRanks = 4;
    constexpr uint64_t kPeers = kRanks - 1;
    on_each_backend(kCpuBackends, [](const BackendSpec& spec) {
        const WithLsaTeam team(1);
        for (const auto& [layout, sums] : {std::pair{NCCL_EP_LAYOUT_EXPERT_MAJOR, CROSSDOCK_SUMS_EXACT},
                                           std::pair{NCCL_EP_LAYOUT_EXPERT_MAJOR, CROSSDOCK_SUMS_SENDER},
                                           std::pair{NCCL_EP_LAYOUT_RANK_MAJOR, CROSSDOCK_SUMS_EXACT}}) {
            Problem shape = busy_problem(kRanks, layout, 3);
            shape.max_tokens = 20;
            shape.sums = sums;
            const bool sender_sums = sums == CROSSDOCK_SUMS_SENDER;
            const auto expect_puts = [&](const Problem& problem, uint64_t puts_of_first, uint64_t puts_of_others) {
                expect_clean(spec, kRanks, std::nullopt, [=](RankContext& context) {
                    Group group(context, problem);
                    Layer layer(context, group.get(), problem);
                    layer.round_trip();
                    const uint64_t expected = context.rank() == 0 ? puts_of_first : puts_of_others;
                    const uint64_t seen = traffic_of(context, group.get()).puts;
                    RANK_CHECK(context, seen == expected, "{} puts, expected {}", seen, expected);
                });
            };
            // Entry, rows, counts; entry, rows, the operation's word; weights.
            const uint64_t puts = kPeers * (sender_sums ? 7 : 6);
            for (const int tokens : {1, 7, 20})
                expect_puts(with_tokens(shape, std::vector<int>(kRanks, tokens), false), puts, puts);
            // Rank 0 returns 57 rows or twice as many, with room for 80.
            const bool by_choice = layout == NCCL_EP_LAYOUT_EXPERT_MAJOR && !sender_sums;
            expect_puts(with_tokens(shape, {20, 18, 19, 20}, true), kPeers * 5 + (by_choice ? 1 : 0),
                        kPeers * 3 + (sender_sums ? 2 : 1));
        }
    });
}

// With masks, everybody goes on with those that it still reaches.
TEST(LsaTeam, SurvivorsOfACutGoOn) {
    on_each_backend({Backend::kSimulation}, [](const BackendSpec& backend) {
        constexpr int kRanks = 4;
        const WithLsaTeam team(2);
        struct Case {
            ncclEpLayout_t layout;
            crossdockSums_t sums;
        };
        for (const auto& [layout, sums] : {Case{NCCL_EP_LAYOUT_EXPERT_MAJOR, CROSSDOCK_SUMS_EXACT},
                                           Case{NCCL_EP_LAYOUT_EXPERT_MAJOR, CROSSDOCK_SUMS_SENDER},
                                           Case{NCCL_EP_LAYOUT_RANK_MAJOR, CROSSDOCK_SUMS_EXACT}}) {
            const RankProgram program = [layout = layout, sums = sums](RankContext& context) {
                Problem problem = busy_problem(kRanks, layout, 2);
                problem.sums = sums;
                Group group(context, context.comm(), mask_config(context, problem, 1'000'000));
                Layer layer(context, group.get(), problem);
                for (int step = 0; step < 4; ++step) degraded_step(context, group.get(), layer);
            };
            harm_at_many_steps(backend, Harm::kCut, kRanks, 1, seeds_or(0, 100), program);
        }
    });
}

// Networks that are very slow or very late change nothing.
TEST(LsaTeam, TheNetworksSpeedDoesNotMatter) {
    on_each_backend({Backend::kSimulation}, [](const BackendSpec& backend) {
        const WithLsaTeam team(2);
        for (const uint64_t delay_ns : {1u, 300u, 3'000'000u}) {
            for (const uint64_t ns_per_kib : {1u, 20'000u}) {
                for (uint64_t seed = 1; seed <= seeds_or(1, 10).count; ++seed) {
                    BackendSpec spec = backend;
                    spec.simulation.seed = seed;
                    spec.simulation.max_put_delay_ns = delay_ns;
                    spec.simulation.put_ns_per_kib = ns_per_kib;
                    expect_clean(spec, 4, seed,
                                 round_trips(random_problem(seed, {.num_ranks = 4, .most_row_bytes = 256})));
                }
            }
        }
    });
}

// A handle with a pending send_only operation may go at any time: nothing that is still under way meets a later one.
TEST(LsaTeam, PendingOperationsMayBeGivenUp) {
    on_each_backend(kCpuBackends, [](const BackendSpec& backend) {
        const WithLsaTeam team(1);
        for (uint64_t seed = 1; seed <= seeds_or(1, 40).count; ++seed) {
            BackendSpec spec = backend;
            spec.simulation.seed = seed;
            spec.simulation.max_put_delay_ns = 500'000;
            expect_clean(spec, 3, seed, [seed](RankContext& context) {
                const auto layout = seed % 2 == 0 ? NCCL_EP_LAYOUT_EXPERT_MAJOR : NCCL_EP_LAYOUT_RANK_MAJOR;
                const Problem problem = busy_problem(3, layout, seed);
                Group group(context, problem);
                Layer kept(context, group.get(), problem);
                for (int round = 0; round < 3; ++round) {
                    Layer given_up(context, group.get(), rerouted(problem, seed + 10));
                    if (round == 1) given_up.round_trip();
                    if (round != 1) given_up.prepare_dispatch();
                    if (round == 1) given_up.prepare_combine();
                    RANK_OK(context, round == 1 ? given_up.send_combine() : given_up.send_dispatch());
                    if (round == 2) kept.round_trip();
                }
                for (int trip = 0; trip < 3; ++trip) kept.round_trip();
            });
        }
    });
}

// The same where nobody waits for those whose rows are still under way: sums at the source rank, in the very buffer
// that was given up.
TEST(LsaTeam, LateRowsMeetNoSums) {
    on_each_backend({Backend::kSimulation}, [](const BackendSpec& backend) {
        const WithLsaTeam team(1);
        constexpr int kRanks = 3;
        const Problem far = busy_problem(kRanks, NCCL_EP_LAYOUT_RANK_MAJOR, 1);
        Problem near = busy_problem(kRanks, NCCL_EP_LAYOUT_RANK_MAJOR, 2);
        for (int rank = 0; rank < kRanks; ++rank) {
            auto& ids = near.ranks[rank].ids;
            for (size_t i = 0; i < ids.size(); ++i)
                ids[i] = i % kRanks < 2 ? 2 * rank + static_cast<int>(i % kRanks) : -1;
        }
        for (uint64_t seed = 1; seed <= seeds_or(1, 40).count; ++seed) {
            BackendSpec spec = backend;
            spec.simulation.seed = seed;
            spec.simulation.max_put_delay_ns = 100'000'000;
            expect_clean(spec, kRanks, seed, [&](RankContext& context) {
                Group group(context, near);
                Layer kept(context, group.get(), near);
                kept.round_trip();
                std::vector<std::unique_ptr<Layer>> pending;
                for (int i = 0; i < 2; ++i) {
                    pending.push_back(std::make_unique<Layer>(context, group.get(), far));
                    pending.back()->prepare_dispatch();
                    RANK_OK(context, pending.back()->send_dispatch());
                }
                pending.erase(pending.begin());
                for (int i = 0; i < 2; ++i) {
                    kept.prepare_combine();
                    RANK_OK(context, kept.combine());
                    kept.check_combine();
                }
            });
        }
    });
}

TEST(LsaTeam, WrongTeamSizesAreRefused) {
    on_each_backend({Backend::kThreads, Backend::kSimulation}, [](const BackendSpec& spec) {
        expect_clean(spec, 4, std::nullopt, [](RankContext& context) {
            const Problem problem = busy_problem(4, NCCL_EP_LAYOUT_RANK_MAJOR, 1);
            ncclEpGroupConfig_t config = group_config_for(context, problem);
            crossdockGroupOptions_t wrong = CROSSDOCK_GROUP_OPTIONS_INIT;
            ncclEpGroup_t group = nullptr;
            const auto create = [&] { return crossdockCreateGroup(&group, context.comm(), &config, &wrong); };
            for (const int lsa_team_size : {3, 5, 8}) {
                wrong.lsa_team_size = lsa_team_size;
                RANK_REFUSED(context, ncclInvalidArgument, "allowed: 1, 2, 4", create());
                RANK_REFUSED(context, ncclInvalidArgument, "LSA teams", create());
                RANK_REFUSED(context, ncclInvalidArgument, fmt::format("options->lsa_team_size is {}", lsa_team_size),
                             create());
            }
            wrong.lsa_team_size = -1;
            RANK_REFUSED(context, ncclInvalidArgument, "options->lsa_team_size is -1", create());
            wrong.lsa_team_size = context.rank() == 2 ? 1 : 2;
            RANK_REFUSED(context, ncclInvalidUsage, "lsa_team_size differs", create());

            // Options of before there were teams.
            wrong.size = offsetof(crossdockGroupOptions_t, lsa_team_size);
            RANK_OK(context, create());
            RANK_CHECK(context, traffic_of(context, group).lsa_team_size == 4, "a field past the struct was read");
            crossdockTraffic_t traffic = CROSSDOCK_TRAFFIC_INIT;
            traffic.magic = 1;
            RANK_REFUSED(context, ncclInvalidArgument, "magic", crossdockGroupTraffic(group, &traffic));
            RANK_REFUSED(context, ncclInvalidArgument, "traffic", crossdockGroupTraffic(group, nullptr));
            RANK_OK(context, ncclEpGroupDestroy(group));
        });
    });
}

// CROSSDOCK_LSA_TEAM_SIZE overrides the option, and is judged like it.
TEST(LsaTeam, TheEnvironmentDecides) {
    on_each_backend({Backend::kProcesses, Backend::kSimulation}, [](const BackendSpec& spec) {
        const auto run_with = [&](const char* value, int expected) {
            setenv("CROSSDOCK_LSA_TEAM_SIZE", value, 1);
            expect_clean(spec, 4, std::nullopt, [=](RankContext& context) {
                const Problem problem = busy_problem(4, NCCL_EP_LAYOUT_RANK_MAJOR, 1);
                const ncclEpGroupConfig_t config = group_config_for(context, problem);
                crossdockGroupOptions_t group_options = CROSSDOCK_GROUP_OPTIONS_INIT;
                group_options.lsa_team_size = 2;
                ncclEpGroup_t group = nullptr;
                if (expected == 0) {
                    RANK_REFUSED(context, ncclInvalidArgument, "CROSSDOCK_LSA_TEAM_SIZE is 3",
                                 crossdockCreateGroup(&group, context.comm(), &config, &group_options));
                    return;
                }
                RANK_OK(context, crossdockCreateGroup(&group, context.comm(), &config, &group_options));
                const crossdockTraffic_t traffic = traffic_of(context, group);
                RANK_CHECK(context, traffic.lsa_team_size == expected, "{}", traffic.lsa_team_size);
                RANK_OK(context, ncclEpGroupDestroy(group));
            });
            unsetenv("CROSSDOCK_LSA_TEAM_SIZE");
        };
        run_with("1", 1);
        run_with("4", 4);
        run_with("3", 0);
        run_with("nonsense", 2);
    });
}

}  // namespace
}  // namespace crossdock::testing
