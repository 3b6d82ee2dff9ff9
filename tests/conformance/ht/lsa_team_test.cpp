// SPDX-License-Identifier: Apache-2.0
// High throughput in groups of several LSA teams (nodes): rows arrive where they would in one team, sums are
// those of the teams' sums, and what crosses is what docs/scaling.md says.
#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <utility>

#include "conformance/support/fault_support.h"
#include "conformance/support/layer.h"
#include "conformance/support/scoped_arena.h"
#include "conformance/support/with_lsa_team.h"

namespace crossdock::testing {
namespace {

RankProgram round_trips(const Problem& problem, const Problem& next) {
    return [problem, next](RankContext& context) {
        ScopedArena arena(context, kHtWindowBytes);
        const ncclEpGroupConfig_t config = group_config_for(context, problem);
        Group group(context, context.comm(), config, problem.invariant);
        for (const bool windows : {false, true}) {
            LayerOptions options;
            options.arena = arena.get();
            options.windows = windows ? kOutputs | kCombineInput : 0;
            Layer layer(context, group.get(), problem, options);
            layer.round_trip();
            layer.route(next);
            layer.round_trip();
        }
    };
}

// 1 x 8, 2 x 4, 4 x 2 and 8 x 1: the reference says what each has to give.
TEST(HtLsaTeam, EveryShapeMatchesTheReference) {
    on_each_backend({Backend::kProcesses, Backend::kThreads, Backend::kSimulation}, [](const BackendSpec& spec) {
        const uint64_t num_seeds = seeds_or(81, 4).count;
        for (uint64_t seed = 81; seed < 81 + num_seeds; ++seed) {
            const Problem problem = random_problem(
                seed, {.algorithm = kHighThroughput, .num_ranks = 8, .most_row_bytes = 512, .invariant_groups = true});
            for (const int lsa_team_size : {8, 4, 2, 1}) {
                const WithLsaTeam team(lsa_team_size);
                expect_clean(spec, 8, seed, round_trips(problem, rerouted(problem, seed + 1000)));
            }
        }
    });
}

// Many nodes: 16 ranks as 4 x 4, 64 as 8 x 8.
TEST(HtLsaTeam, ManyNodesMatchTheReference) {
    on_each_backend({Backend::kThreads, Backend::kSimulation}, [](const BackendSpec& spec) {
        for (const int lsa_team_size : {4, 8}) {
            const WithLsaTeam team(lsa_team_size);
            for (const ncclEpLayout_t layout : kHtLayouts) {
                const Problem problem = plain_problem(lsa_team_size * lsa_team_size, layout, 3, kHighThroughput);
                expect_clean(spec, lsa_team_size * lsa_team_size, 3, [problem](RankContext& context) {
                    Group group(context, problem);
                    Layer layer(context, group.get(), problem);
                    layer.round_trip();
                });
            }
        }
    });
}

// A token's ranks, and its teams but the one of its source rank.
struct Destinations {
    std::set<int> ranks;
    std::set<int> other_teams;

    Destinations(const Problem& problem, int source, int token, int lsa_team_size) {
        for (int k = 0; k < problem.num_topk; ++k) {
            const int rank = problem.target_rank(source, token, k);
            if (rank < 0) continue;
            ranks.insert(rank);
            if (rank / lsa_team_size != source / lsa_team_size) other_teams.insert(rank / lsa_team_size);
        }
    }
};

// How small rows cross on a backend: in `channels` rings between two rail peers. batch: rows per credit, and at most
// per put (fixed_gin_slots and kHtMostGinSlots in core/ht/arena.h).
struct Crossing {
    int channels;
    int batch;

    Crossing(Backend kind, int lsa_team_size)
        : channels(kind == Backend::kSimulation ? 2 : 1),
          batch(kind != Backend::kSimulation ? 8
                : lsa_team_size == 1         ? 2
                                             : 3) {}

    // For a source rank's tokens that cross to a team.
    struct Messages {
        uint64_t credits = 0;
        uint64_t saved_puts = 0;  // most that may be saved by putting rows together
    };
    Messages messages(const Problem& problem, int source, int team, int lsa_team_size) const {
        const int tokens = problem.ranks[source].num_tokens;
        Messages num;
        for (int channel = 0, token = 0; channel < channels; ++channel) {
            const int end = token + tokens / channels + (channel < tokens % channels ? 1 : 0);
            int rows = 0;
            for (; token < end; ++token)
                rows += static_cast<int>(Destinations(problem, source, token, lsa_team_size).other_teams.count(team));
            num.credits += static_cast<uint64_t>(rows / batch);
            num.saved_puts += static_cast<uint64_t>(rows - (rows + batch - 1) / batch);
        }
        return num;
    }
};

// What a rank's update, forward dispatch and forward combine put, if each row is put by itself, and how many puts may
// be saved. A row is put with others if these are ready before the rank waits for a peer.
struct ExpectedTraffic {
    crossdockTraffic_t each_by_itself = CROSSDOCK_TRAFFIC_INIT;
    uint64_t saved_puts = 0;
    uint64_t saved_by_dispatch = 0;  // of these
};
ExpectedTraffic expected_traffic(const Problem& problem, int rank, int lsa_team_size, const Crossing& crossing) {
    ExpectedTraffic expected;
    crossdockTraffic_t& traffic = expected.each_by_itself;
    traffic.lsa_team_size = lsa_team_size;
    const int num_ranks = problem.num_ranks;
    const int team = rank / lsa_team_size;
    const uint64_t words = (static_cast<uint64_t>(problem.local_experts()) + 63) / 64;
    const uint64_t tokens = static_cast<uint64_t>(problem.ranks[rank].num_tokens);
    const auto put = [&](uint64_t bytes) {
        traffic.puts += bytes > 0 ? 1 : 0;
        traffic.bytes_crossed += bytes;
    };
    // Without bytes the signal goes alone.
    const auto put_and_raise = [&](uint64_t bytes) {
        put(bytes);
        traffic.signals += bytes > 0 ? 0 : 1;
        traffic.bytes_crossed += 8;
    };
    const auto raise = [&](uint64_t num) {
        traffic.signals += num;
        traffic.bytes_crossed += 8 * num;
    };
    const auto is_gin_peer = [&](int peer) { return peer / lsa_team_size != team; };
    const uint64_t weights_of_row = 4 * ((std::min<uint64_t>(problem.num_topk, problem.local_experts()) + 3) / 4 * 4);
    for (int peer = 0; peer < num_ranks; ++peer) {
        if (!is_gin_peer(peer)) continue;
        put(16 * words * tokens);  // which of its experts the tokens go to
        put_and_raise(8);          // how many tokens; the routing is there
        put_and_raise(8);          // how many rows come here
        const bool is_rail = peer % lsa_team_size == rank % lsa_team_size;
        if (is_rail) put(4 * static_cast<uint64_t>(lsa_team_size) * ((problem.max_tokens + 31) / 32));
        for (int operation = 0; operation < 3; ++operation) put_and_raise(8);       // it has come, with these terms
        for (int chunk = 0; chunk < problem.ranks[rank].num_tokens; chunk += 32) {  // the weights of a chunk
            uint64_t rows = 0;
            for (int token = chunk; token < std::min(chunk + 32, problem.ranks[rank].num_tokens); ++token)
                rows += Destinations(problem, rank, token, lsa_team_size).ranks.count(peer);
            put_and_raise(weights_of_row * rows);
        }
        // Rows that came have been read, and sums; weights are too few for a credit.
        for (const auto& [source, target] : {std::pair{peer, team}, std::pair{rank, peer / lsa_team_size}}) {
            if (!is_rail) continue;
            const Crossing::Messages messages = crossing.messages(problem, source, target, lsa_team_size);
            raise(messages.credits);
            expected.saved_puts += messages.saved_puts;
            if (source == rank) expected.saved_by_dispatch += messages.saved_puts;
        }
        for (int token = 0; is_rail && token < problem.ranks[peer].num_tokens; ++token) {
            if (Destinations(problem, peer, token, lsa_team_size).other_teams.count(team) == 0) continue;
            put_and_raise(problem.combine_row_bytes());  // the sum
            traffic.rows_crossed += 1;
        }
    }
    for (int token = 0; token < problem.ranks[rank].num_tokens; ++token) {
        const uint64_t rows = Destinations(problem, rank, token, lsa_team_size).other_teams.size();
        traffic.rows_crossed += rows;
        for (uint64_t i = 0; i < rows; ++i) put_and_raise(problem.token_row_bytes() + problem.scale_row_bytes());
    }
    return expected;
}

// A row crosses once per team and direction, whatever the number of its ranks there; all messages are those of the
// model. Nothing lies between rows of these sizes that are put together.
TEST(HtLsaTeam, TrafficIsWhatTheModelSays) {
    on_each_backend({Backend::kProcesses, Backend::kThreads, Backend::kSimulation}, [](const BackendSpec& spec) {
        for (const int lsa_team_size : {1, 2, 3}) {
            const WithLsaTeam team(lsa_team_size);
            for (const ncclEpLayout_t layout : kHtLayouts) {
                const Problem problem = plain_problem(6, layout, 7, kHighThroughput);
                expect_clean(spec, 6, std::nullopt, [=](RankContext& context) {
                    Group group(context, problem);
                    Layer layer(context, group.get(), problem);
                    layer.pass(NCCL_EP_FWD_PASS);
                    const auto [expected, saved_puts, saved_by_dispatch] =
                        expected_traffic(problem, context.rank(), lsa_team_size, Crossing(spec.kind, lsa_team_size));
                    crossdockTraffic_t seen = CROSSDOCK_TRAFFIC_INIT;
                    RANK_OK(context, crossdockGroupTraffic(group.get(), &seen));
                    RANK_CHECK(context, seen.rows_crossed == expected.rows_crossed, "{}, expected {}",
                               seen.rows_crossed, expected.rows_crossed);
                    const uint64_t saved = expected.puts - seen.puts;
                    RANK_CHECK(context, saved <= saved_puts, "{} puts, expected {} to {}", seen.puts,
                               expected.puts - saved_puts, expected.puts);
                    // Here dispatched rows wait for nobody, but for the simulation's small rings. Rows of a combine
                    // wait for those of their team, and for nobody where a rank is a team.
                    const uint64_t certain = spec.kind == Backend::kSimulation ? 0
                                             : lsa_team_size == 1              ? saved_puts
                                                                               : saved_by_dispatch;
                    RANK_CHECK(context, saved >= certain, "{} puts, expected at most {}", seen.puts,
                               expected.puts - certain);
                    RANK_CHECK(context, seen.signals == expected.signals, "{}, expected {}", seen.signals,
                               expected.signals);
                    RANK_CHECK(context, seen.bytes_crossed == expected.bytes_crossed - 8 * saved, "{}, expected {}",
                               seen.bytes_crossed, expected.bytes_crossed - 8 * saved);
                });
            }
        }
    });
}

// Networks that are very slow or very late change nothing.
TEST(HtLsaTeam, TheNetworksSpeedDoesNotMatter) {
    on_each_backend({Backend::kSimulation}, [](const BackendSpec& backend) {
        const WithLsaTeam team(2);
        for (const uint64_t delay_ns : {1u, 300u, 3'000'000u}) {
            for (const uint64_t ns_per_kib : {1u, 20'000u}) {
                for (uint64_t seed = 1; seed <= seeds_or(1, 6).count; ++seed) {
                    BackendSpec spec = backend;
                    spec.simulation.seed = seed;
                    spec.simulation.max_put_delay_ns = delay_ns;
                    spec.simulation.put_ns_per_kib = ns_per_kib;
                    const Problem problem =
                        random_problem(seed, {.algorithm = kHighThroughput, .num_ranks = 4, .most_row_bytes = 256});
                    expect_clean(spec, 4, seed, round_trips(problem, rerouted(problem, seed + 7)));
                }
            }
        }
    });
}

TEST(HtLsaTeam, MasksAreRefused) {
    on_each_backend({Backend::kThreads}, [](const BackendSpec& spec) {
        expect_clean(spec, 4, std::nullopt, [](RankContext& context) {
            const Problem problem = plain_problem(4, NCCL_EP_LAYOUT_FLAT, 1, kHighThroughput);
            const ncclEpGroupConfig_t config = group_config_for(context, problem);
            crossdockGroupOptions_t options = CROSSDOCK_GROUP_OPTIONS_INIT;
            options.lsa_team_size = 2;
            options.ht_masks = 1;
            ncclEpGroup_t group = nullptr;
            RANK_REFUSED(context, ncclInvalidUsage, "options->ht_masks is 1",
                         crossdockCreateGroup(&group, context.comm(), &config, &options));
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
