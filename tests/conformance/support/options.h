// SPDX-License-Identifier: Apache-2.0
// The command line of the suite, and how a failed run is reported.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backends/run_ranks.h"

namespace crossdock::testing {

struct Options {
    std::vector<Backend> backends;
    std::optional<int> num_ranks;
    std::optional<int> lsa_team_size;
    std::optional<uint64_t> seed;
    std::optional<uint64_t> num_seeds;
};

// As the command line says; set by main before the tests run.
Options& options();

// The seeds that a test runs: those of the command line, or [first, first + count).
struct Seeds {
    uint64_t first;
    uint64_t count;
};
Seeds seeds_or(uint64_t first, uint64_t count);

// Of the seeds that a fast backend runs, those that another one does in about the same time.
uint64_t seeds_in(Backend kind, uint64_t count);

// How many ranks a test that would like `wanted` has: --ranks, if given.
int ranks_or(int wanted);

// The ranks of an LSA team in a group of so many: the largest even share that --lsa-team allows. 0:
// as the communicator has it.
int lsa_team_for(int num_ranks);
// Whether GPUs share the host's memory: NCCL_LSA_TEAM_SIZE gives each a team of its own, or there is no network plugin.
bool gpus_share_host_memory();
bool is_one_lsa_team(int num_ranks);

// Whether --backend allows it.
bool backend_is_selected(Backend kind);

// The command line that runs the current test again, on this backend, with this seed.
std::string replay_line(Backend kind, int num_ranks, std::optional<uint64_t> seed);

// Runs the program and reports each failure of it together with its replay line. seed: a test's own, and that of the
// simulation; none: the schedule is as good as any other, and that of --seed, if given.
RunReport expect_clean(const BackendSpec& spec, int num_ranks, std::optional<uint64_t> seed,
                       const RankProgram& program);

// Runs the program in the simulation beside a rank that writes garbage. It is a failure if memory outside of the
// program's buffers is written, a rank waits forever, or a program throws. Returns false if calls have failed or rows
// were wrong.
bool survives_garbage(const BackendSpec& backend, int num_ranks, uint64_t seed, const RankProgram& program);

// Seeds 1, 2, ... of the simulation, until a run has a failure with these words. It is a failure if none of so many
// has.
void expect_fault_is_caught(const BackendSpec& backend, uint64_t most_seeds, const std::string& words,
                            const std::function<RunReport(BackendSpec spec)>& run);

// For every selected backend that is also among `kinds`: calls run(spec). A test that finds none says that it skipped,
// and why.
void on_each_backend(const std::vector<Backend>& kinds, const std::function<void(const BackendSpec&)>& run);
// The same with all ranks in one LSA team, whatever --lsa-team says. GPUs' teams are NCCL's: where there are several,
// GPUs are left out.
void on_each_backend_as_one_team(const std::vector<Backend>& kinds, const std::function<void(const BackendSpec&)>& run);
// Those of `kinds` whose ranks reach each other's windows: not GPUs that share the host's memory.
std::vector<Backend> reaching_windows(std::vector<Backend> kinds);
extern const std::vector<Backend> kEveryBackend;
extern const std::vector<Backend> kCpuBackends;

}  // namespace crossdock::testing
