// SPDX-License-Identifier: Apache-2.0
// Random kernels (random_kernel.h) do in the simulator, over threads, processes and hosts what the model says, and a
// planted mistake is found with one of ten seeds: a rank's launch that begins when another's has ended follows it, and
// then there is no race. CROSSDOCK_KERNEL_SEEDS: how many kernels, instead of 300.
#include "random_kernel.h"

#include <gtest/gtest.h>

#include <string_view>

#include "ways.h"

namespace {

using namespace random_kernel;

constexpr uint64_t kSeedsOfMistakes = 10;

uint64_t num_seeds() {
    const char* value = std::getenv("CROSSDOCK_KERNEL_SEEDS");
    return value == nullptr ? 300 : std::strtoull(value, nullptr, 10);
}

TEST(RandomKernels, TheSimulatorLeavesCorrectOnesAlone) {
    for (uint64_t seed = 0; seed < num_seeds(); ++seed) {
        const Program program = draw(seed);
        ASSERT_EQ(in_simulation(setup_of(program), seed, body_of(program)), "") << "kernel " << seed;
    }
}

TEST(RandomKernels, EveryWayDoesAsTheModel) {
    for (uint64_t seed = 0; seed < num_seeds() / 10; ++seed) {
        const Program program = draw(seed);
        for (const Way& way : kWays) {
            const bool makes_processes = std::string_view(way.backend) != "threads";
            if (makes_processes && seed % 10 != 0) continue;
            ASSERT_EQ(on(way, setup_of(program), body_of(program)), "") << "kernel " << seed << ", " << way.name();
        }
    }
}

// Calls with any arguments do what they say, or end the kernel with a message that names a line: no crash.
TEST(RandomKernels, WildCallsEndWithAMessage) {
    uint64_t num_refused = 0;
    for (uint64_t seed = 0; seed < 4 * num_seeds(); ++seed) {
        const Program program = draw_wild(Random(seed));
        const std::string failure = in_simulation(setup_of(program), seed, body_of(program));
        if (failure.empty()) continue;
        ++num_refused;
        EXPECT_NE(failure.find("random_kernel.h:"), std::string::npos) << "kernel " << seed << ": " << failure;
    }
    EXPECT_GT(num_refused, num_seeds());
}

TEST(RandomKernels, TheSimulatorFindsPlantedMistakes) {
    const std::pair<Mistake, const char*> mistakes[] = {
        {kNoWait, "data read without waiting for a signal that covers the put"},
        {kNoFlush, "source changed before a flush or a counter said that it was read"},
        {kWeakForAll, "data read without waiting for a signal that covers the put"},
        {kNoGetFlush, "get was done"},
        {kNoFence, "data read without waiting for a signal that covers the put"},
    };
    for (const auto& [mistake, message] : mistakes) {
        // Few: each report looks up source lines, which takes longer than the runs.
        uint64_t num_planted = 0;
        for (uint64_t seed = 0; seed < num_seeds() / 10; ++seed) {
            const Program program = draw(seed, mistake);
            if (!program.has_mistake) continue;
            ++num_planted;
            std::string failure;
            for (uint64_t i = 0; i < kSeedsOfMistakes && failure.empty(); ++i) {
                failure = in_simulation(setup_of(program), seed + i, body_of(program));
            }
            ASSERT_NE(failure.find(message), std::string::npos)
                << "mistake " << mistake << " of kernel " << seed << ": " << failure;
        }
        EXPECT_GT(num_planted, 0u);
    }
}

}  // namespace
