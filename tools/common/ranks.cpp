// SPDX-License-Identifier: Apache-2.0
#include "tools/common/ranks.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <optional>
#include <thread>

#include "crossdock/communicator.hpp"
#include "crossdock/simulation.h"
#include "tools/common/shared_array.h"

namespace crossdock::tools {
namespace {

using Clock = std::chrono::steady_clock;

// Where a rank says how it ended; lies in memory that processes share.
struct RankEnd {
    std::atomic<bool> ended;
    std::atomic<bool> failed;
    char message[1022];

    void fail(const char* text) {
        std::snprintf(message, sizeof message, "%s", text);
        failed.store(true, std::memory_order_release);
    }
};

// Runs the program and records how it ended.
void run_recorded(RankEnd& end, const std::function<void()>& program) {
    try {
        program();
    } catch (const std::exception& error) {
        end.fail(error.what());
    } catch (...) {
        end.fail("ended with an exception that is no std::exception");
    }
    end.ended.store(true, std::memory_order_release);
}

// Ranks that are threads: one per rank, or one for all of them. Its state outlives this object if a thread hangs.
class ThreadRun : public RankRun {
  public:
    struct State {
        explicit State(int num_ranks) : ends(static_cast<size_t>(num_ranks)), whole(1) {}

        SharedArray<RankEnd> ends;
        SharedArray<RankEnd> whole;  // the run as such
        std::atomic<int> num_running{0};
    };

    explicit ThreadRun(int num_ranks) : state_(std::make_shared<State>(num_ranks)) {}
    ~ThreadRun() override {
        for (std::thread& thread : threads_) {
            hanging_ ? thread.detach() : thread.join();
        }
    }

    const std::shared_ptr<State>& state() { return state_; }

    void start(std::function<void()> body) {
        state_->num_running.fetch_add(1);
        threads_.emplace_back([state = state_, body = std::move(body)] {
            body();
            state->num_running.fetch_sub(1);
        });
    }

  protected:
    bool all_ended() override { return state_->num_running.load() == 0; }

    std::vector<RankFailure> failures() override {
        std::vector<RankFailure> failures;
        if (state_->whole[0].failed.load(std::memory_order_acquire)) {
            failures.push_back({-1, state_->whole[0].message});
        }
        for (size_t rank = 0; rank < state_->ends.size(); ++rank) {
            if (state_->ends[rank].failed.load(std::memory_order_acquire)) {
                failures.push_back({static_cast<int>(rank), state_->ends[rank].message});
            } else if (hanging_ && !state_->ends[rank].ended.load(std::memory_order_acquire)) {
                failures.push_back({static_cast<int>(rank), "did not end after another rank had failed"});
            }
        }
        return failures;
    }

    void give_up() override { hanging_ = true; }

  private:
    std::shared_ptr<State> state_;
    std::vector<std::thread> threads_;
    bool hanging_ = false;
};

class ProcessRun : public RankRun {
  public:
    explicit ProcessRun(int num_ranks, std::optional<UniqueId> id = std::nullopt)
        : id_(std::move(id)), ends_(static_cast<size_t>(num_ranks)) {}
    ~ProcessRun() override {
        give_up();
        while (!all_ended()) {
            usleep(1000);
        }
    }

    void start(int rank, const std::function<void()>& body) {
        const pid_t parent = getpid();
        std::fflush(nullptr);
        const pid_t pid = fork();
        if (pid < 0) {
            throw std::runtime_error(
                fmt::format("the process of rank {} cannot be started: {}", rank, strerror(errno)));
        }
        if (pid == 0) {
            // A rank whose parent has ended has no process to report to.
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != parent) {
                _exit(1);
            }
            RankEnd& end = ends_[static_cast<size_t>(rank)];
            run_recorded(end, body);
            std::fflush(nullptr);
            _exit(end.failed.load() ? 1 : 0);
        }
        pids_.push_back(pid);
        statuses_.push_back(0);
        gave_up_on_.push_back(0);
    }

  protected:
    bool all_ended() override {
        bool all = true;
        for (size_t rank = 0; rank < pids_.size(); ++rank) {
            if (pids_[rank] > 0 && waitpid(pids_[rank], &statuses_[rank], WNOHANG) == pids_[rank]) {
                pids_[rank] = 0;
            }
            all = all && pids_[rank] == 0;
        }
        return all;
    }

    std::vector<RankFailure> failures() override {
        std::vector<RankFailure> failures;
        for (size_t rank = 0; rank < pids_.size(); ++rank) {
            const int status = statuses_[rank];
            if (ends_[rank].failed.load(std::memory_order_acquire)) {
                failures.push_back({static_cast<int>(rank), ends_[rank].message});
            } else if (pids_[rank] == 0 && WIFSIGNALED(status)) {
                const bool killed_here = gave_up_on_[rank] != 0;
                failures.push_back(
                    {static_cast<int>(rank), killed_here ? "did not end after another rank had failed"
                                                         : fmt::format("killed by signal {} ({})", WTERMSIG(status),
                                                                       strsignal(WTERMSIG(status)))});
            } else if (pids_[rank] == 0 && WEXITSTATUS(status) != 0) {
                failures.push_back({static_cast<int>(rank), fmt::format("exited with {}", WEXITSTATUS(status))});
            }
        }
        return failures;
    }

    void give_up() override {
        for (size_t rank = 0; rank < pids_.size(); ++rank) {
            if (pids_[rank] > 0) {
                gave_up_on_[rank] = 1;
                kill(pids_[rank], SIGKILL);
            }
        }
    }

  private:
    std::optional<UniqueId> id_;  // if the ranks join with one
    SharedArray<RankEnd> ends_;
    std::vector<pid_t> pids_;
    std::vector<int> statuses_;
    std::vector<char> gave_up_on_;
};

struct SimulationRun {
    RankProgram program;
    std::shared_ptr<ThreadRun::State> state;
    int num_ranks;
};

void run_simulated_rank(ncclComm_t comm, int rank, void* context) {
    const auto& run = *static_cast<SimulationRun*>(context);
    run_recorded(run.state->ends[static_cast<size_t>(rank)], [&] {
        run.program(RankContext{rank, run.num_ranks, comm});
    });
}

}  // namespace

std::vector<RankFailure> RankRun::wait(const std::function<void()>& tick, double grace_s) {
    bool deadline_set = false;
    Clock::time_point deadline;
    while (!all_ended()) {
        tick();
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        if (!deadline_set && !failures().empty()) {
            deadline_set = true;
            deadline = Clock::now() + std::chrono::microseconds(static_cast<int64_t>(grace_s * 1e6));
        }
        if (deadline_set && Clock::now() > deadline) {
            give_up();
            // Killed processes end at once; threads cannot be ended and are left behind.
            for (int attempt = 0; attempt < 50 && !all_ended(); ++attempt) {
                std::this_thread::sleep_for(std::chrono::milliseconds(20));
            }
            break;
        }
    }
    tick();
    return failures();
}

std::unique_ptr<RankRun> start_threads(int num_ranks, RankProgram program) {
    auto communicators = std::make_shared<std::vector<Communicator>>(Communicator::threads(num_ranks));
    auto run = std::make_unique<ThreadRun>(num_ranks);
    for (int rank = 0; rank < num_ranks; ++rank) {
        run->start([=, state = run->state()] {
            const RankContext context{rank, num_ranks, (*communicators)[static_cast<size_t>(rank)].get()};
            run_recorded(state->ends[static_cast<size_t>(rank)], [&] { program(context); });
        });
    }
    return run;
}

std::unique_ptr<RankRun> start_processes(int num_ranks, RankProgram program) {
    UniqueId owner;
    const ncclUniqueId id = owner.get();
    auto run = std::make_unique<ProcessRun>(num_ranks, std::move(owner));
    for (int rank = 0; rank < num_ranks; ++rank) {
        run->start(rank, [&] {
            const Communicator communicator = Communicator::join(id, num_ranks, rank);
            program(RankContext{rank, num_ranks, communicator.get()});
        });
    }
    return run;
}

std::unique_ptr<RankRun> start_hosts(int num_ranks, int ranks_per_host, RankProgram program) {
    // Below the ports that the system itself gives to connections.
    const std::string address = fmt::format("127.0.0.1:{}", 10'000 + getpid() % 20'000);
    auto run = std::make_unique<ProcessRun>(num_ranks);
    for (int rank = 0; rank < num_ranks; ++rank) {
        run->start(rank, [&] {
            setenv("CROSSDOCK_HOST", fmt::format("host{}", rank / ranks_per_host).c_str(), 1);
            const Communicator communicator = Communicator::join_hosts(address.c_str(), num_ranks, rank);
            program(RankContext{rank, num_ranks, communicator.get()});
        });
    }
    return run;
}

std::unique_ptr<RankRun> start_simulation(int num_ranks, uint64_t seed, RankProgram program) {
    auto run = std::make_unique<ThreadRun>(num_ranks);
    run->start([=, state = run->state()] {
        crossdockSimulationConfig_t config = CROSSDOCK_SIMULATION_CONFIG_INIT;
        config.seed = seed;
        SimulationRun fibers{program, state, num_ranks};
        run_recorded(state->whole[0],
                     [&] { check(crossdockRunSimulation(num_ranks, &config, run_simulated_rank, &fibers, nullptr)); });
    });
    return run;
}

std::unique_ptr<RankRun> start_ranks(Backend backend, const StartOptions& options, RankProgram program) {
    switch (backend) {
        case Backend::kThreads:
        case Backend::kCuda:
            return start_threads(options.num_ranks, std::move(program));
        case Backend::kProcesses:
        case Backend::kCudaProcesses:
            return start_processes(options.num_ranks, std::move(program));
        case Backend::kHosts:
            return start_hosts(options.num_ranks, options.ranks_per_host, std::move(program));
        case Backend::kSimulation:
            return start_simulation(options.num_ranks, options.seed, std::move(program));
    }
    return nullptr;
}

std::string to_string(const RankFailure& failure) {
    return failure.rank < 0 ? failure.message : fmt::format("rank {}: {}", failure.rank, failure.message);
}

}  // namespace crossdock::tools
