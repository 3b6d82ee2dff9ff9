// SPDX-License-Identifier: Apache-2.0
// Jobs in which a rank is killed at a random time, while ranks come late, are done early, and end as soon as a call
// fails, without destroying anything: each survivor's message names the killed rank, never one that ended because of
// it. Ranks are processes, or a simulation plays them.
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <regex>

#include "backends/cpu_rank.h"
#include "backends/internal.h"
#include "conformance/support/fault_support.h"
#include "conformance/support/modes.h"

namespace crossdock::testing {
namespace {

// What a rank was told, in memory that all processes share.
using Message = std::array<char, 512>;

class Messages {
  public:
    explicit Messages(int num_ranks) : bytes_(sizeof(Message) * static_cast<size_t>(num_ranks)) {
        void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        of_ranks_ = static_cast<Message*>(memory);
    }
    ~Messages() { munmap(of_ranks_, bytes_); }
    Messages(const Messages&) = delete;
    Messages& operator=(const Messages&) = delete;
    Message& operator[](int rank) { return of_ranks_[rank]; }

  private:
    size_t bytes_;
    Message* of_ranks_;
};

// The ranks that a message says are lost: "2" or "0, 2".
std::string named_in(const std::string& message) {
    static const std::regex kNames(
        "(?:lost|(?:waiting|waits)(?: at [^ ]+)? for|connecting to) ranks? ([0-9, ]*[0-9])|rank ([0-9]+) is lost");
    std::smatch found;
    return std::regex_search(message, found, kNames) ? found[1].str() + found[2].str() : "";
}

void note_failure(Message& message) {
    const std::string text = crossdockGetLastError();
    text.copy(message.data(), message.size() - 1);
    if (text.empty()) message[0] = '?';
}

void be_killed_after(int us) {
    const itimerval once{{0, 0}, {0, us}};
    setitimer(ITIMER_REAL, &once, nullptr);  // nobody handles the signal, which ends the process
}

// What a job draws.
struct Job {
    explicit Job(uint64_t seed) {
        Random random(seed);
        num_ranks = 2 + random.below(4);
        killed = random.below(num_ranks);
        kill_after_us = 1 + random.below(60'000);
        mode = random.chance(50) ? kLowLatency : kHighThroughput;
        layout = layouts_of(mode)[static_cast<size_t>(random.below(2))];
        ranks_per_host = num_ranks % 2 == 0 && random.chance(50) ? 2 : random.pick({1, num_ranks});
        num_steps = 1 + random.below(200);
        for (int rank = 0; rank < num_ranks; ++rank) {
            late_us.push_back(random.chance(33) ? random.below(8'000) : 0);
            thinks_us.push_back(random.chance(50) ? random.below(20'000) : 0);
            ends.push_back(random.below(3));
        }
    }
    int num_ranks, killed, kill_after_us;
    ncclEpAlgorithm_t mode;
    ncclEpLayout_t layout;
    int ranks_per_host, num_steps;
    std::vector<int> late_us;
    std::vector<int> thinks_us;  // between steps: a rank that comes back finds several ranks gone
    std::vector<int> ends;  // how a rank ends: 0: at once, 1: as a program does, 2: it destroys group and communicator
};

// Steps until a call fails, or all are made. Returns false if one failed.
bool run_steps(RankContext& context, const Job& job, ncclEpGroup_t group, const Problem& problem, int num_steps) try {
    Layer layer(context, group, problem, {.without_update = is_ht(job.mode), .peers_may_die = true});
    const auto thinks_us =
        context.is_simulated() ? 0 : static_cast<useconds_t>(job.thinks_us[static_cast<size_t>(context.rank())]);
    for (int step = 0; step < num_steps; ++step) {
        if (thinks_us != 0) usleep(thinks_us);
        for (int phase = 0; phase < num_phases(job.mode); ++phase) {
            prepare_phase(layer, phase);
            if (run_phase(layer, phase) != ncclSuccess) return false;
        }
        if (step % 8 == 3 && crossdockCommBarrier(context.comm()) != ncclSuccess) return false;
    }
    return true;
} catch (const StopProgram&) {
    return false;  // a handle that could not be made
}

void live_and_leave(RankContext& context, const Job& job, Messages& messages) {
    const int rank = context.rank();
    // Until all have joined.
    RANK_OK(context, crossdockCommBarrier(context.comm()));
    if (rank == job.killed) be_killed_after(job.kill_after_us);
    usleep(static_cast<useconds_t>(job.late_us[static_cast<size_t>(rank)]));
    const Problem problem = busy_problem(job.num_ranks, job.layout, 4, job.mode);
    const ncclEpGroupConfig_t config = group_config_for(context, problem);
    ncclEpGroup_t group = nullptr;
    const bool is_clean = create_group(context, &group, context.comm(), &config) == ncclSuccess &&
                          run_steps(context, job, group, problem, job.num_steps);
    if (!is_clean) note_failure(messages[rank]);
    const int end = job.ends[static_cast<size_t>(rank)];
    if (end == 0) _exit(0);
    if (end == 1) std::exit(0);
    if (group != nullptr) ncclEpGroupDestroy(group);
}

// Returns how many survivors were told; adds a failure for each that names another rank.
int check_names(const Job& job, Messages& messages, const std::string& replay, int& num_wrong) {
    int num_told = 0;
    bool is_wrong = false;
    for (int rank = 0; rank < job.num_ranks; ++rank) {
        const std::string message = messages[rank].data();
        if (message.empty() || rank == job.killed) continue;
        ++num_told;
        if (named_in(message) == std::to_string(job.killed)) continue;
        is_wrong = true;
        std::string all;
        for (int each = 0; each < job.num_ranks; ++each)
            all += fmt::format("\nrank {}: {}", each, messages[each].data());
        ADD_FAILURE() << "rank " << job.killed << " of " << job.num_ranks << " was killed, and rank " << rank
                      << " names another:" << all << "\nreplay: " << replay;
    }
    num_wrong += is_wrong ? 1 : 0;
    return num_told;
}

// Runs jobs; run(spec, job, messages) runs one.
template <typename Run>
void expect_right_names(const std::vector<Backend>& backends, uint64_t num_jobs, Run run) {
    on_each_backend(backends, [&](const BackendSpec& backend) {
        const Seeds seeds = seeds_or(0, num_jobs);
        int num_told = 0;
        int num_wrong = 0;
        for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
            const Job job(seed);
            Messages messages(job.num_ranks);
            BackendSpec spec = backend;
            spec.doomed = {job.killed};
            spec.ranks_per_host = job.ranks_per_host;
            const RunReport report = run(spec, job, messages);
            const std::string replay = replay_line(spec.kind, job.num_ranks, seed);
            for (const std::string& failure : report.failures) ADD_FAILURE() << failure << "\nreplay: " << replay;
            num_told += check_names(job, messages, replay, num_wrong);
        }
        EXPECT_GT(num_told, 0) << "no job lost its rank in time";
        std::printf("%s: %llu jobs, %d survivors were told, %d jobs with a wrong name\n", backend_name(backend.kind),
                    static_cast<unsigned long long>(seeds.count), num_told, num_wrong);
    });
}

TEST(Kill, AtAnyTimeIsNamedByAllSurvivors) {
    expect_right_names({Backend::kProcesses, Backend::kHosts}, 25,
                       [](const BackendSpec& spec, const Job& job, Messages& messages) {
                           return run_ranks(spec, job.num_ranks,
                                            [&](RankContext& context) { live_and_leave(context, job, messages); });
                       });
}

// A way in which ranks join; it lasts as long as the job.
using JoinAs = std::function<ncclResult_t(ncclComm_t* comm, int rank)>;
JoinAs way_to_join(const BackendSpec& spec, int num_ranks) {
    if (spec.kind == Backend::kProcesses) {
        ncclUniqueId id{};
        EXPECT_EQ(crossdockGetUniqueId(&id), ncclSuccess) << crossdockGetLastError();
        return [=](ncclComm_t* comm, int rank) { return crossdockCommInitRank(comm, num_ranks, id, rank); };
    }
    return [num_ranks, ranks_per_host = spec.ranks_per_host, address = free_address()](ncclComm_t* comm, int rank) {
        setenv("CROSSDOCK_HOST", fmt::format("host{}", rank / ranks_per_host).c_str(), 1);
        return crossdockCommInitHosts(comm, num_ranks, rank, address.c_str());
    };
}

// Then ranks wait until they time out, or are told; those that give up first are not missing.
TEST(Kill, WhileRanksJoinIsNamedByAllSurvivors) {
    expect_right_names(
        {Backend::kProcesses, Backend::kHosts}, 16, [](const BackendSpec& spec, const Job& job, Messages& messages) {
            const JoinAs join = way_to_join(spec, job.num_ranks);
            // Processes join within a few ms, hosts within a few tens.
            const int kill_after_us = spec.kind == Backend::kHosts ? job.kill_after_us : 1 + job.kill_after_us / 10;
            return fork_ranks(spec, job.num_ranks, [&](int rank) -> ChildReport {
                setenv("CROSSDOCK_JOIN_TIMEOUT_MS", "1000", 1);
                if (rank == job.killed) be_killed_after(kill_after_us);
                usleep(static_cast<useconds_t>(job.late_us[static_cast<size_t>(rank)]));
                ncclComm_t comm = nullptr;
                if (join(&comm, rank) != ncclSuccess || crossdockCommBarrier(comm) != ncclSuccess)
                    note_failure(messages[rank]);
                _exit(0);
            });
        });
}

// A rank that has lost another one may make other calls than one that has not noticed yet, as to destroy its group:
// that is no mistake of the program.
TEST(Kill, OtherCallsOfARankThatFailedAreNoMistake) {
    on_each_backend({Backend::kProcesses, Backend::kHosts}, [](const BackendSpec& backend) {
        constexpr int kRanks = 3, kKilled = 2;
        Messages messages(kRanks);
        BackendSpec spec = backend;
        spec.doomed = {kKilled};
        spec.ranks_per_host = kRanks;
        const JoinAs join = way_to_join(spec, kRanks);
        const RunReport report = fork_ranks(spec, kRanks, [&](int rank) -> ChildReport {
            ncclComm_t comm = nullptr;
            // The barrier: until all have joined.
            if (join(&comm, rank) != ncclSuccess || crossdockCommBarrier(comm) != ncclSuccess)
                return {{crossdockGetLastError()}, 0};
            if (rank == kKilled) raise(SIGKILL);
            void* memory = nullptr;
            ncclWindow_t window = nullptr;
            if (rank == 0) {
                crossdockCommBarrier(comm);
            } else {
                while (std::atomic_ref(messages[0][0]).load() == '\0') sched_yield();
                crossdockMemAlloc(&memory, 4096);
                crossdockCommWindowRegister(comm, memory, 4096, &window, 0);
            }
            note_failure(messages[rank]);
            crossdockCommDestroy(comm);
            crossdockMemFree(memory);
            return {};
        });
        EXPECT_EQ(report.failures, std::vector<std::string>());
        for (const int rank : {0, 1})
            EXPECT_EQ(named_in(messages[rank].data()), std::to_string(kKilled)) << messages[rank].data();
    });
}

// Groups that programs leave behind, as a process leaves them to the system.
struct LeftGroups {
    std::vector<ncclEpGroup_t> groups;
    ~LeftGroups() {
        for (ncclEpGroup_t group : groups) ncclEpGroupDestroy(group);
    }
};

// leaves_after: steps after which the job's lost rank returns from its program; -1: it stays.
void live_in_simulation(RankContext& context, const Job& job, int leaves_after, Messages& messages, LeftGroups& left) {
    const int rank = context.rank();
    // A rank that could not join has no communicator.
    if (context.comm() == nullptr || crossdockCommBarrier(context.comm()) != ncclSuccess)
        return note_failure(messages[rank]);
    const Problem problem = busy_problem(job.num_ranks, job.layout, 4, job.mode);
    ncclEpGroupConfig_t config = group_config_for(context, problem);
    config.timeout_ns = kNeverNs;  // nobody waits for the timeout
    ncclEpGroup_t group = nullptr;
    const bool leaves = rank == job.killed && leaves_after >= 0;
    const int num_steps = 1 + job.num_steps % 6;
    const bool is_clean =
        create_group(context, &group, context.comm(), &config) == ncclSuccess &&
        run_steps(context, job, group, problem, leaves ? std::min(leaves_after, num_steps) : num_steps);
    if (!is_clean) note_failure(messages[rank]);
    if (group == nullptr) return;
    // To destroy it is collective.
    if (job.ends[static_cast<size_t>(rank)] == 2 && !leaves)
        ncclEpGroupDestroy(group);
    else
        left.groups.push_back(group);
}

// Ranks of a simulation that are as processes: they start late, join, and end without destroying anything. One is
// killed at any step, often while ranks join, or returns from its program early. Nothing depends on timeouts, and
// without a loss nobody is named.
TEST(Kill, InASimulationIsNamedByAllSurvivors) {
    on_each_backend({Backend::kSimulation}, [&](const BackendSpec& backend) {
        const Seeds seeds = seeds_or(0, 400);
        int num_told = 0, num_joining = 0, num_wrong = 0;
        for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count && num_wrong == 0; ++seed) {
            const Job job(seed);
            Random random(seed + 1'000'000);
            BackendSpec spec = backend;
            spec.simulation.seed = seed;
            spec.simulation.are_processes = 1;
            const std::string replay = replay_line(spec.kind, job.num_ranks, seed);
            // Returns how many steps it took.
            const auto run = [&](Messages& messages, int leaves_after) {
                LeftGroups left;
                const RunReport report = run_ranks(spec, job.num_ranks, [&](RankContext& context) {
                    live_in_simulation(context, job, leaves_after, messages, left);
                });
                for (const std::string& failure : failures_of_others(report, job.killed))
                    ADD_FAILURE() << failure << "\nreplay: " << replay;
                return report.num_steps;
            };
            Messages healthy(job.num_ranks), messages(job.num_ranks);
            const auto num_steps = static_cast<int>(run(healthy, -1));
            for (int rank = 0; rank < job.num_ranks; ++rank)
                EXPECT_STREQ(healthy[rank].data(), "") << "rank " << rank << " of a healthy job\nreplay: " << replay;
            const bool is_killed = random.chance(75);
            if (is_killed) {
                spec.simulation.killed_rank = job.killed;
                spec.simulation.killed_at_step =
                    static_cast<uint64_t>(random.below(random.chance(33) ? 100 : num_steps));
            }
            run(messages, is_killed ? -1 : random.below(6));
            num_told += check_names(job, messages, replay, num_wrong);
            for (int rank = 0; rank < job.num_ranks; ++rank)
                num_joining += std::string(messages[rank].data()).find("to join") != std::string::npos ? 1 : 0;
        }
        EXPECT_GT(num_told, num_joining);
        EXPECT_GT(num_joining, 0) << "no rank was killed while ranks joined";
        std::printf("%d survivors were told, %d while ranks joined\n", num_told, num_joining);
    });
}

}  // namespace
}  // namespace crossdock::testing
