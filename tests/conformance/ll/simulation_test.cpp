// SPDX-License-Identifier: Apache-2.0
// In the simulation one seed is one run, thousands of seeds are clean, and faults that are planted are caught.
#include <gtest/gtest.h>

#include <set>

#include "conformance/ll/sequence.h"
#include "conformance/support/options.h"
#include "conformance/support/with_domain.h"

namespace crossdock::testing {
namespace {

const SequenceShape kShape{.num_groups = 1,
                           .layers_per_group = 2,
                           .num_steps = 12,
                           .limits = {.most_row_bytes = 256, .most_receive_bytes = 32u << 10, .most_tokens = 5}};

RankProgram sequence_of(uint64_t seed) {
    return [seed](RankContext& context) { run_sequence(context, kShape, seed); };
}

int ranks_of(uint64_t seed) { return ranks_or(2 + static_cast<int>(reference::random_bits(seed, 9) % 3)); }

BackendSpec seeded(const BackendSpec& backend, uint64_t seed) {
    BackendSpec spec = backend;
    spec.deterministic.seed = seed;
    return spec;
}

TEST(Simulation, ThousandsOfSeedsAreClean) {
    on_each_backend({Backend::kSimulation}, [](const BackendSpec& backend) {
        const Seeds seeds = seeds_or(100'001, 2000);
        for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count && !::testing::Test::HasFailure(); ++seed) {
            expect_clean(seeded(backend, seed), ranks_of(seed), seed, sequence_of(seed));
        }
    });
}

TEST(Simulation, OneSeedIsOneRun) {
    on_each_backend({Backend::kSimulation}, [](const BackendSpec& backend) {
        std::set<uint64_t> numbers_of_steps;
        for (uint64_t seed = 1; seed <= 20; ++seed) {
            // The script is the same for all seeds of the backend, so runs differ by the schedule only.
            const RunReport one = expect_clean(seeded(backend, seed), 3, seed, sequence_of(7));
            const RunReport other = expect_clean(seeded(backend, seed), 3, seed, sequence_of(7));
            EXPECT_EQ(one.num_steps, other.num_steps) << "seed " << seed;
            EXPECT_EQ(one.digests, other.digests) << "seed " << seed;
            numbers_of_steps.insert(one.num_steps);
        }
        EXPECT_GT(numbers_of_steps.size(), 3u) << "seeds hardly change the schedule";
    });
}

// How many seeds it takes until a fault shows, in the results or to the checkers of the protocol; 0: never.
uint64_t seeds_until_caught(const BackendSpec& backend, crossdockFault_t fault, uint64_t most_seeds) {
    for (uint64_t seed = 1; seed <= most_seeds; ++seed) {
        BackendSpec spec = seeded(backend, seed);
        spec.deterministic.fault = fault;
        if (!run_ranks(spec, ranks_of(seed), sequence_of(seed)).ok()) return seed;
    }
    return 0;
}

TEST(Simulation, ASkippedWaitForACopyIsCaught) {
    on_each_backend({Backend::kSimulation}, [](const BackendSpec& backend) {
        const uint64_t caught = seeds_until_caught(backend, CROSSDOCK_FAULT_SKIP_STORE_WAIT, 50);
        EXPECT_GT(caught, 0u) << "flags before data went unseen for 50 seeds";
        RecordProperty("seeds_until_caught", static_cast<int>(caught));
    });
}

TEST(Simulation, AReusedSlotIsCaught) {
    on_each_backend({Backend::kSimulation}, [](const BackendSpec& backend) {
        const uint64_t caught = seeds_until_caught(backend, CROSSDOCK_FAULT_REUSE_SLOT, 200);
        EXPECT_GT(caught, 0u) << "senders without credit went unseen for 200 seeds";
        RecordProperty("seeds_until_caught", static_cast<int>(caught));
    });
}

// Whatever a rank writes into the others' memory, calls end, and nothing outside their outputs is written.
TEST(Simulation, NonsenseIsSurvived) {
    on_each_backend({Backend::kSimulation}, [](const BackendSpec& backend) {
        const Seeds seeds = seeds_or(1, 400);
        uint64_t clean = 0;
        for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count && !::testing::Test::HasFailure(); ++seed)
            clean += survives_nonsense(backend, ranks_of(seed), seed, sequence_of(seed)) ? 1 : 0;
        EXPECT_TRUE(clean < seeds.count || seeds.count < 50) << "nobody saw nonsense";
    });
}

// The same between two domains.
TEST(Simulation, NonsenseIsSurvivedBetweenDomains) {
    on_each_backend({Backend::kSimulation}, [](const BackendSpec& backend) {
        const WithDomain domain(2);
        const Seeds seeds = seeds_or(1, 100);
        uint64_t clean = 0;
        for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count && !::testing::Test::HasFailure(); ++seed)
            clean += survives_nonsense(backend, 4, seed, sequence_of(seed)) ? 1 : 0;
        EXPECT_TRUE(clean < seeds.count || seeds.count < 50) << "nobody saw nonsense";
    });
}

// Copies that take very long or no time change nothing.
TEST(Simulation, DelaysOfCopiesDoNotMatter) {
    on_each_backend({Backend::kSimulation}, [](const BackendSpec& backend) {
        for (const uint64_t delay_ns : {1u, 1'000u, 3'000'000u}) {
            for (uint64_t seed = 1; seed <= 20; ++seed) {
                BackendSpec spec = seeded(backend, seed);
                spec.deterministic.max_copy_delay_ns = delay_ns;
                expect_clean(spec, ranks_of(seed), seed, sequence_of(seed));
            }
        }
    });
}

TEST(Simulation, WrongArgumentsAreRefused) {
    on_each_backend({Backend::kSimulation}, [](const BackendSpec&) {
        const crossdockRankProgram_t nothing = [](ncclComm_t, int, void*) {};
        crossdockDeterministicConfig_t config = CROSSDOCK_DETERMINISTIC_CONFIG_INIT;
        EXPECT_EQ(crossdockRunDeterministic(0, &config, nothing, nullptr, nullptr), ncclInvalidArgument);
        EXPECT_EQ(crossdockRunDeterministic(-1, &config, nothing, nullptr, nullptr), ncclInvalidArgument);
        EXPECT_EQ(crossdockRunDeterministic(2, &config, nullptr, nullptr, nullptr), ncclInvalidArgument);
        config.magic = 1;
        EXPECT_EQ(crossdockRunDeterministic(2, &config, nothing, nullptr, nullptr), ncclInvalidArgument);
        EXPECT_NE(std::string(crossdockGetLastError()).find("magic"), std::string::npos) << crossdockGetLastError();
        EXPECT_EQ(crossdockRunDeterministic(2, nullptr, nothing, nullptr, nullptr), ncclSuccess);
    });
}

}  // namespace
}  // namespace crossdock::testing
