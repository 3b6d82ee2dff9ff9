// SPDX-License-Identifier: Apache-2.0
// The form of rows is no part of a result: with CROSSDOCK_LL128 off, LL sends plain rows where it would send LL128 rows
// otherwise (GPUs with NVLink, the simulation), and what arrives and what returns is the same. Ranks must agree on it.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>

#include "conformance/support/bad_call.h"
#include "conformance/support/layer.h"
#include "conformance/support/options.h"
#include "conformance/support/random_problem.h"

namespace crossdock::testing {
namespace {

constexpr const char* kVariable = "CROSSDOCK_LL128";

// Round trips of both layouts; adds their symmetric memory to `bytes`, which ranks of other processes cannot reach.
void run_problems(const BackendSpec& spec, std::atomic<size_t>& bytes) {
    for (uint64_t seed = 1; seed <= seeds_in(spec.kind, 6) && !::testing::Test::HasFailure(); ++seed) {
        Problem problem = random_problem(seed, {.num_ranks = ranks_or(3),
                                                .most_row_bytes = 2048,
                                                .most_tokens = 4,
                                                .quantised_combines = !is_cuda(spec.kind)});
        problem.layout = kLlLayouts[seed % 2];
        SCOPED_TRACE(problem.describe());
        BackendSpec seeded = spec;
        seeded.simulation.seed = seed;
        expect_clean(seeded, problem.num_ranks, seed, [&](RankContext& context) {
            Group group(context, problem);
            Layer layer(context, group.get(), problem);
            layer.round_trip();
            layer.round_trip();
            size_t symmetric = 0;
            RANK_OK(context, crossdockGroupMemory(group.get(), &symmetric, nullptr));
            if (context.rank() == 0) bytes += symmetric;
        });
    }
}

TEST(Ll128, PlainRowsGiveTheSameResults) {
    on_each_backend(kEveryBackend, [](const BackendSpec& spec) {
        std::atomic<size_t> with_plain_rows{0}, with_any_rows{0};
        setenv(kVariable, "0", 1);
        run_problems(spec, with_plain_rows);
        setenv(kVariable, "1", 1);
        run_problems(spec, with_any_rows);
        unsetenv(kVariable);
        const bool has_ll128 =
            spec.kind == Backend::kSimulation || (spec.kind == Backend::kCuda && !gpus_share_host_memory());
        if (!has_ll128 || !is_one_lsa_team(ranks_or(3))) return;
        EXPECT_LT(with_plain_rows.load(), with_any_rows.load()) << "an LL128 row needs more memory than a plain one";
    });
}

TEST(Ll128, RanksMustAgree) {
    // Threads share an environment.
    on_each_backend({Backend::kProcesses, Backend::kCudaProcesses}, [](const BackendSpec& spec) {
        expect_clean(spec, ranks_or(2), std::nullopt, [](RankContext& context) {
            const ncclEpGroupConfig_t config = good_group_config(context, NCCL_EP_ALGO_LOW_LATENCY);
            ncclEpGroup_t group = nullptr;
            for (const char* odd : {"0", "1"}) {
                if (context.rank() == 1) setenv(kVariable, odd, 1);
                RANK_REFUSED(context, ncclInvalidUsage, "CROSSDOCK_LL128",
                             ncclEpCreateGroup(&group, context.comm(), &config));
                RANK_CHECK(context, group == nullptr, "a group was written");
            }
            unsetenv(kVariable);
            RANK_OK(context, ncclEpCreateGroup(&group, context.comm(), &config));
            RANK_OK(context, ncclEpGroupDestroy(group));
        });
    });
}

}  // namespace
}  // namespace crossdock::testing
