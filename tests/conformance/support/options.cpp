// SPDX-License-Identifier: Apache-2.0
#include "conformance/support/options.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <string_view>

#include "conformance/support/with_lsa_team.h"

namespace crossdock::testing {

const std::vector<Backend> kEveryBackend = backends_where([](const BackendOption&) { return true; });
const std::vector<Backend> kCpuBackends = backends_where([](const BackendOption& each) { return !each.is_cuda; });

Options& options() {
    static Options instance;
    return instance;
}

Seeds seeds_or(uint64_t first, uint64_t count) {
    return {options().seed.value_or(first), options().num_seeds.value_or(options().seed ? 1 : count)};
}

uint64_t seeds_in(Backend kind, uint64_t count) {
    if (kind == Backend::kThreads || kind == Backend::kSimulation) return count;
    const uint64_t share = kind == Backend::kHosts           ? 10  // every run connects all its processes
                           : kind == Backend::kCudaProcesses ? 20  // every run starts CUDA and NCCL in all of them
                                                             : 2;
    return std::max<uint64_t>(1, count / share);
}

int ranks_or(int wanted) { return options().num_ranks.value_or(wanted); }

int lsa_team_for(int num_ranks) {
    int team = std::min(options().lsa_team_size.value_or(0), num_ranks);
    while (team > 0 && num_ranks % team != 0) --team;
    return team;
}

bool is_one_lsa_team(int num_ranks) { return lsa_team_for(num_ranks) == 0 || lsa_team_for(num_ranks) == num_ranks; }

bool backend_is_selected(Backend kind) {
    const std::vector<Backend>& backends = options().backends;
    return std::find(backends.begin(), backends.end(), kind) != backends.end();
}

std::string replay_line(Backend kind, int num_ranks, std::optional<uint64_t> seed) {
    const ::testing::TestInfo* test = ::testing::UnitTest::GetInstance()->current_test_info();
    std::string line = fmt::format("crossdock_conformance --backend {} --ranks {}", backend_name(kind), num_ranks);
    if (options().lsa_team_size) line += fmt::format(" --lsa-team {}", *options().lsa_team_size);
    if (seed) line += fmt::format(" --seed {}", *seed);
    if (test != nullptr) line += fmt::format(" --gtest_filter={}.{}", test->test_suite_name(), test->name());
    return line;
}

RunReport expect_clean(const BackendSpec& spec, int num_ranks, std::optional<uint64_t> seed,
                       const RankProgram& program) {
    BackendSpec shaped = spec;
    shaped.ranks_per_host = lsa_team_for(num_ranks);
    if (!seed) seed = options().seed;
    if (seed) shaped.simulation.seed = *seed;
    RunReport report = run_ranks(shaped, num_ranks, program);
    if (!report.ok()) {
        std::string text;
        for (const std::string& failure : report.failures) text += failure + "\n";
        ADD_FAILURE() << text << "replay: " << replay_line(spec.kind, num_ranks, seed);
    }
    return report;
}

void expect_fault_is_caught(const BackendSpec& backend, uint64_t most_seeds, const std::string& words,
                            const std::function<RunReport(BackendSpec spec)>& run) {
    for (uint64_t seed = 1; seed <= most_seeds; ++seed) {
        BackendSpec spec = backend;
        spec.simulation.seed = seed;
        const std::vector<std::string> failures = run(spec).failures;
        const auto says = [&](const std::string& failure) { return failure.find(words) != std::string::npos; };
        if (!std::any_of(failures.begin(), failures.end(), says)) continue;
        ::testing::Test::RecordProperty("seeds_until_caught", static_cast<int>(seed));
        return;
    }
    ADD_FAILURE() << "unseen for " << most_seeds << " seeds";
}

bool survives_garbage(const BackendSpec& backend, int num_ranks, uint64_t seed, const RankProgram& program) {
    BackendSpec spec = backend;
    spec.simulation.seed = seed;
    spec.fault = cpu::Fault::kWriteGarbage;
    const RunReport report = run_ranks(spec, num_ranks, program);
    for (const std::string& failure : report.failures) {
        const auto says = [&](const char* words) { return failure.find(words) != std::string::npos; };
        if (!says("memory before") && !says("memory after") && !says("deadlock") && !says("exception")) continue;
        ADD_FAILURE() << failure << "\nreplay: " << replay_line(spec.kind, num_ranks, seed);
    }
    return report.ok();
}

void on_each_backend(const std::vector<Backend>& kinds, const std::function<void(const BackendSpec&)>& run) {
    std::string why = "it does not concern the selected backends";
    bool ran = false;
    for (const Backend kind : kinds) {
        if (!backend_is_selected(kind)) continue;
        if (const std::string reason = why_unavailable(kind); !reason.empty()) {
            why = fmt::format("{}: {}", backend_name(kind), reason);
            continue;
        }
        SCOPED_TRACE(backend_name(kind));
        BackendSpec spec;
        spec.kind = kind;
        run(spec);
        ran = true;
    }
    if (!ran) GTEST_SKIP() << why;
}

bool gpus_share_host_memory() {
    const auto text = [](const char* name) -> std::string_view {
        const char* value = std::getenv(name);
        return value == nullptr ? "" : value;
    };
    const std::string_view team = text("NCCL_LSA_TEAM_SIZE");
    const std::string_view choice = text("CROSSDOCK_HOST_MEMORY");
    const std::string_view plugin = text("NCCL_RMA_PLUGIN");
    const bool is_off = choice == "0" || choice == "off" || choice == "false" || options().lsa_team_size.has_value();
    return !is_off && !team.empty() && (team == "1" || plugin.empty() || plugin == "none");
}

std::vector<Backend> reaching_windows(std::vector<Backend> kinds) {
    if (gpus_share_host_memory()) std::erase_if(kinds, is_cuda);
    return kinds;
}

void on_each_backend_as_one_team(const std::vector<Backend>& kinds,
                                 const std::function<void(const BackendSpec&)>& run) {
    std::vector<Backend> fitting = kinds;
    if (!is_one_lsa_team(ranks_or(INT_MAX))) std::erase_if(fitting, is_cuda);
    const WithLsaTeam one_team(0);
    on_each_backend(fitting, run);
}

}  // namespace crossdock::testing
