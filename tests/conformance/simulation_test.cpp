// SPDX-License-Identifier: Apache-2.0
// In the simulation one seed is one run, thousands of seeds are clean, and faults that are planted are caught, in
// either mode.
#include <set>

#include "conformance/support/modes.h"
#include "conformance/support/sequence.h"
#include "conformance/support/with_lsa_team.h"

namespace crossdock::testing {
namespace {

// High throughput: low-latency handles come between, if wanted.
RankProgram sequence_of(ncclEpAlgorithm_t mode, uint64_t seed, bool both_modes = true) {
    const ProblemLimits ll{.most_row_bytes = 256, .most_receive_bytes = 32u << 10, .most_tokens = 5};
    const ProblemLimits ht{
        .algorithm = kHighThroughput, .most_row_bytes = 256, .most_receive_bytes = 16u << 10, .most_tokens = 5};
    SequenceShape shape{.groups = {is_ht(mode) ? ht : ll}, .layers_per_group = 2, .num_steps = is_ht(mode) ? 10 : 12};
    if (is_ht(mode) && both_modes && seed % 8 == 0) shape.groups.push_back(ll);
    shape.windows = is_ht(mode) && seed % 2 == 0;
    return [=](RankContext& context) { run_sequence(context, shape, seed); };
}

// So many seeds of low latency take as long as half as many of high throughput.
uint64_t share_of(ncclEpAlgorithm_t mode, uint64_t num_seeds) { return is_ht(mode) ? num_seeds / 2 : num_seeds; }

int ranks_of(uint64_t seed) { return ranks_or(2 + static_cast<int>(reference::random_bits(seed, 9) % 3)); }

void on_simulation(const std::function<void(const BackendSpec&)>& run) { on_each_backend({Backend::kSimulation}, run); }

TEST_BOTH_MODES(Simulation, ThousandsOfSeedsAreClean) {
    on_simulation([=](const BackendSpec& backend) {
        const Seeds seeds = seeds_or(is_ht(mode) ? 300'001 : 100'001, share_of(mode, 2000));
        for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count && !::testing::Test::HasFailure(); ++seed)
            expect_clean(backend, ranks_of(seed), seed, sequence_of(mode, seed));
    });
}

TEST_BOTH_MODES(Simulation, OneSeedIsOneRun) {
    on_simulation([=](const BackendSpec& backend) {
        std::set<uint64_t> numbers_of_steps;
        for (uint64_t seed = 1; seed <= share_of(mode, 20); ++seed) {
            // The script is the same for all seeds of the backend, so runs differ by the schedule only.
            const RunReport one = expect_clean(backend, 3, seed, sequence_of(mode, 8));
            const RunReport other = expect_clean(backend, 3, seed, sequence_of(mode, 8));
            EXPECT_EQ(one.num_steps, other.num_steps) << "seed " << seed;
            EXPECT_EQ(one.digests, other.digests) << "seed " << seed;
            numbers_of_steps.insert(one.num_steps);
        }
        EXPECT_GT(numbers_of_steps.size(), 3u) << "seeds hardly change the schedule";
    });
}

// Results do not depend on the schedule.
TEST_BOTH_MODES(Simulation, EverySeedGivesTheSameBits) {
    on_simulation([=](const BackendSpec& backend) {
        const RunReport first = expect_clean(backend, 4, 1, sequence_of(mode, 12));
        for (uint64_t seed = 2; seed <= 10; ++seed)
            EXPECT_EQ(expect_clean(backend, 4, seed, sequence_of(mode, 12)).digests, first.digests);
    });
}

void expect_caught(ncclEpAlgorithm_t mode, const BackendSpec& backend, cpu::Fault fault, uint64_t most_seeds) {
    expect_fault_is_caught(backend, most_seeds, "", [=](BackendSpec spec) {
        spec.fault = fault;
        return run_ranks(spec, ranks_of(spec.simulation.seed), sequence_of(mode, spec.simulation.seed, false));
    });
}

// Flags before data.
TEST_BOTH_MODES(Simulation, ASkippedWaitForACopyIsCaught) {
    on_simulation([=](const BackendSpec& backend) { expect_caught(mode, backend, cpu::Fault::kSkipStoreWait, 50); });
}

// Senders without credit.
TEST_BOTH_MODES(Simulation, AReusedSlotIsCaught) {
    on_simulation([=](const BackendSpec& backend) { expect_caught(mode, backend, cpu::Fault::kReuseSlot, 200); });
}

void expect_survives_garbage(ncclEpAlgorithm_t mode, const BackendSpec& backend, int (*num_ranks)(uint64_t),
                             uint64_t num_seeds) {
    const Seeds seeds = seeds_or(1, num_seeds);
    uint64_t clean = 0;
    for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count && !::testing::Test::HasFailure(); ++seed)
        clean += survives_garbage(backend, num_ranks(seed), seed, sequence_of(mode, seed)) ? 1 : 0;
    EXPECT_TRUE(clean < seeds.count || seeds.count < 50) << "no rank saw garbage";
}

// If a rank writes garbage into the others' memory, calls still end, and write only their outputs.
TEST_BOTH_MODES(Simulation, SurvivesGarbage) {
    on_simulation(
        [=](const BackendSpec& backend) { expect_survives_garbage(mode, backend, ranks_of, share_of(mode, 400)); });
}

// The same between two LSA teams.
TEST_BOTH_MODES(Simulation, SurvivesGarbageBetweenLsaTeams) {
    on_simulation([=](const BackendSpec& backend) {
        const WithLsaTeam team(2);
        expect_survives_garbage(
            mode, backend, [](uint64_t) { return 4; }, share_of(mode, 120));
    });
}

// Copies that take very long or no time change nothing.
TEST_BOTH_MODES(Simulation, DelaysOfCopiesDoNotMatter) {
    on_simulation([=](const BackendSpec& backend) {
        for (const uint64_t delay_ns : {1u, 1'000u, 3'000'000u}) {
            for (uint64_t seed = 1; seed <= share_of(mode, 20); ++seed) {
                BackendSpec spec = backend;
                spec.simulation.max_copy_delay_ns = delay_ns;
                expect_clean(spec, ranks_of(seed), seed, sequence_of(mode, seed));
            }
        }
    });
}

TEST(Simulation, WrongArgumentsAreRefused) {
    on_simulation([](const BackendSpec&) {
        const crossdockRankProgram_t nothing = [](ncclComm_t, int, void*) {};
        crossdockSimulationConfig_t config = CROSSDOCK_SIMULATION_CONFIG_INIT;
        EXPECT_EQ(crossdockRunSimulation(0, &config, nothing, nullptr, nullptr), ncclInvalidArgument);
        EXPECT_EQ(crossdockRunSimulation(-1, &config, nothing, nullptr, nullptr), ncclInvalidArgument);
        EXPECT_EQ(crossdockRunSimulation(2, &config, nullptr, nullptr, nullptr), ncclInvalidArgument);
        config.magic = 1;
        EXPECT_EQ(crossdockRunSimulation(2, &config, nothing, nullptr, nullptr), ncclInvalidArgument);
        EXPECT_NE(std::string(crossdockGetLastError()).find("magic"), std::string::npos) << crossdockGetLastError();
        EXPECT_EQ(crossdockRunSimulation(2, nullptr, nothing, nullptr, nullptr), ncclSuccess);
    });
}

}  // namespace
}  // namespace crossdock::testing
