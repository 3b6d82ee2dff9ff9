// SPDX-License-Identifier: Apache-2.0
// crossdock_conformance [--backend NAME|all-cpu] [--ranks N] [--lsa-team N] [--seed S] [--seeds COUNT]
//                       [GoogleTest's own flags]
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "backends/run_ranks.h"
#include "conformance/support/options.h"

namespace crossdock::testing {
namespace {

std::string backends() { return fmt::format("{} or all-cpu", fmt::join(backend_names(kEveryBackend), ", ")); }

std::string usage() {
    return "crossdock_conformance: the conformance suite, on one backend or all of the CPU's\n"
           "  --backend NAME  " +
           backends() +
           " (default: all-cpu)\n"
           "  --ranks N       ranks of every test that does not fix their number itself, 1 .. 64\n"
           "  --lsa-team N    groups in LSA teams of N ranks, or the next fewer that divide theirs; on the backend "
           "hosts "
           "also\n"
           "                  N ranks per host (default: NCCL_LSA_TEAM_SIZE, where that is set and GPUs do not share\n"
           "                  the host's memory)\n"
           "  --seed S        first seed of tests with random cases\n"
           "  --seeds COUNT   number of random cases, and most pairs of routings of Exhaustive; 1 where only --seed is "
           "given\n"
           "  --gtest_...     GoogleTest's flags, for example --gtest_filter=Random.*\n";
}

[[noreturn]] void refuse(const std::string& message) {
    std::fprintf(stderr, "crossdock_conformance: %s\n%s", message.c_str(), usage().c_str());
    std::exit(2);
}

uint64_t number(const std::string& flag, const std::string& text, uint64_t least, uint64_t most) {
    char* end = nullptr;
    const uint64_t value = std::strtoull(text.c_str(), &end, 0);
    if (text.empty() || *end != '\0' || text[0] == '-' || value < least || value > most) {
        refuse(fmt::format("{} is \"{}\", not a number from {} to {}", flag, text, least, most));
    }
    return value;
}

void select_backend(const std::string& name) {
    const auto one = backend_named(name, kEveryBackend);
    options().backends.clear();
    for (const Backend backend : kEveryBackend) {
        if (backend == one || (name == "all-cpu" && !is_cuda(backend))) options().backends.push_back(backend);
    }
    if (options().backends.empty()) {
        refuse(fmt::format("--backend is \"{}\", not {}", name, backends()));
    }
}

void parse(int argc, char** argv) {
    select_backend("all-cpu");
    for (int i = 1; i < argc; ++i) {
        const std::string flag = argv[i];
        if (flag == "--help") {
            std::fputs(usage().c_str(), stdout);
            std::exit(0);
        }
        if (i + 1 == argc) refuse(fmt::format("{} has no value, or is unknown", flag));
        const std::string value = argv[++i];
        if (flag == "--backend") {
            select_backend(value);
        } else if (flag == "--ranks") {
            options().num_ranks = static_cast<int>(number(flag, value, 1, 64));
        } else if (flag == "--lsa-team") {
            options().lsa_team_size = static_cast<int>(number(flag, value, 1, 64));
        } else if (flag == "--seed") {
            options().seed = number(flag, value, 0, UINT64_MAX);
        } else if (flag == "--seeds") {
            options().num_seeds = number(flag, value, 1, 1000000000);
        } else {
            refuse(fmt::format("{} is unknown", flag));
        }
    }
    // Where NCCL makes several LSA teams, groups have them, whatever they ask for, unless ranks share the host's
    // memory.
    const char* team = std::getenv("NCCL_LSA_TEAM_SIZE");
    if (team != nullptr && !gpus_share_host_memory() && !options().lsa_team_size)
        options().lsa_team_size = static_cast<int>(number("NCCL_LSA_TEAM_SIZE", team, 1, 64));
}

}  // namespace
}  // namespace crossdock::testing

int main(int argc, char** argv) {
    ::testing::InitGoogleTest(&argc, argv);
    crossdock::testing::parse(argc, argv);
    const int result = RUN_ALL_TESTS();
    crossdock::testing::free_kept_communicators();
    return result;
}
