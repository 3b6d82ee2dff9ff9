// SPDX-License-Identifier: Apache-2.0
#include "conformance/support/options.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace crossdock::testing {

// Processes come first: they are forked from this process while it has no threads yet.
const std::vector<WorldKind> kEveryWorld = {WorldKind::kProcesses,     WorldKind::kHosts, WorldKind::kThreads,
                                            WorldKind::kDeterministic, WorldKind::kGpu,   WorldKind::kGpuProcesses};
const std::vector<WorldKind> kCpuWorlds = {WorldKind::kProcesses, WorldKind::kHosts, WorldKind::kThreads,
                                           WorldKind::kDeterministic};

Options& options() {
    static Options instance;
    return instance;
}

Seeds seeds_or(uint64_t first, uint64_t count) {
    return {options().seed.value_or(first), options().num_seeds.value_or(options().seed ? 1 : count)};
}

uint64_t seeds_in(WorldKind kind, uint64_t count) {
    switch (kind) {
        case WorldKind::kThreads:
        case WorldKind::kDeterministic:
            return count;
        case WorldKind::kProcesses:
        case WorldKind::kGpu:
            return std::max<uint64_t>(1, count / 2);
        // Every run connects all its processes.
        case WorldKind::kHosts:
            return std::max<uint64_t>(1, count / 10);
        // Every run starts CUDA and NCCL in all its processes.
        case WorldKind::kGpuProcesses:
            return std::max<uint64_t>(1, count / 20);
    }
    return count;
}

int ranks_or(int wanted) { return options().num_ranks.value_or(wanted); }

int domain_for(int num_ranks) {
    int domain = std::min(options().domain_ranks.value_or(0), num_ranks);
    while (domain > 0 && num_ranks % domain != 0) --domain;
    return domain;
}

bool is_one_domain(int num_ranks) { return domain_for(num_ranks) == 0 || domain_for(num_ranks) == num_ranks; }

bool world_is_selected(WorldKind kind) {
    const std::vector<WorldKind>& worlds = options().worlds;
    return std::find(worlds.begin(), worlds.end(), kind) != worlds.end();
}

std::string replay_line(WorldKind kind, int num_ranks, std::optional<uint64_t> seed) {
    const ::testing::TestInfo* test = ::testing::UnitTest::GetInstance()->current_test_info();
    std::string line = fmt::format("crossdock_conformance --world {} --ranks {}", world_name(kind), num_ranks);
    if (options().domain_ranks) line += fmt::format(" --domain {}", *options().domain_ranks);
    if (seed) line += fmt::format(" --seed {}", *seed);
    if (test != nullptr) line += fmt::format(" --gtest_filter={}.{}", test->test_suite_name(), test->name());
    return line;
}

RunReport expect_clean(const WorldSpec& spec, int num_ranks, std::optional<uint64_t> seed, const RankProgram& program) {
    WorldSpec shaped = spec;
    shaped.ranks_per_host = domain_for(num_ranks);
    RunReport report = run_ranks(shaped, num_ranks, program);
    if (!report.ok()) {
        std::string text;
        for (const std::string& failure : report.failures) text += failure + "\n";
        ADD_FAILURE() << text << "replay: " << replay_line(spec.kind, num_ranks, seed);
    }
    return report;
}

bool survives_nonsense(const WorldSpec& world, int num_ranks, uint64_t seed, const RankProgram& program) {
    WorldSpec spec = world;
    spec.deterministic.seed = seed;
    spec.deterministic.fault = CROSSDOCK_FAULT_WRITE_NONSENSE;
    const RunReport report = run_ranks(spec, num_ranks, program);
    for (const std::string& failure : report.failures) {
        const auto says = [&](const char* words) { return failure.find(words) != std::string::npos; };
        if (!says("memory before") && !says("memory after") && !says("deadlock") && !says("exception")) continue;
        ADD_FAILURE() << failure << "\nreplay: " << replay_line(spec.kind, num_ranks, seed);
    }
    return report.ok();
}

void on_each_world(const std::vector<WorldKind>& kinds, const std::function<void(const WorldSpec&)>& run) {
    std::string why = "it does not concern the selected worlds";
    bool ran = false;
    for (const WorldKind kind : kinds) {
        if (!world_is_selected(kind)) continue;
        if (const std::string reason = why_unavailable(kind); !reason.empty()) {
            why = fmt::format("{}: {}", world_name(kind), reason);
            continue;
        }
        SCOPED_TRACE(world_name(kind));
        WorldSpec spec;
        spec.kind = kind;
        run(spec);
        ran = true;
    }
    if (!ran) GTEST_SKIP() << why;
}

}  // namespace crossdock::testing
