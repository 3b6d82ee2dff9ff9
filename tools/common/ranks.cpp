// SPDX-License-Identifier: Apache-2.0
#include "tools/common/ranks.h"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "crossdock/communicator.hpp"
#include "crossdock/simulation.h"
#include "tools/common/processes.h"

namespace crossdock::tools {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kTick(20);
constexpr const char* kHangs = "did not end after another rank had failed";

// Where a rank says how it ended.
struct RankEnd {
    std::atomic<bool> ended;
    std::atomic<bool> failed;
    std::string message;

    void fail(const char* text) {
        message = text;
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
        explicit State(int num_ranks) : ends(static_cast<size_t>(num_ranks)) {}

        std::vector<RankEnd> ends;
        RankEnd whole{};  // the run as such
        std::mutex mutex;
        std::condition_variable changed;
        int num_running = 0;
    };

    explicit ThreadRun(int num_ranks) : state_(std::make_shared<State>(num_ranks)) {}
    ~ThreadRun() override {
        for (std::thread& thread : threads_) {
            hanging_ ? thread.detach() : thread.join();
        }
    }

    const std::shared_ptr<State>& state() { return state_; }

    void start(std::function<void()> body) {
        {
            const std::lock_guard lock(state_->mutex);
            ++state_->num_running;
        }
        threads_.emplace_back([state = state_, body = std::move(body)] {
            body();
            const std::lock_guard lock(state->mutex);
            --state->num_running;
            state->changed.notify_all();
        });
    }

  protected:
    bool wait_a_while() override {
        std::unique_lock lock(state_->mutex);
        return state_->changed.wait_for(lock, kTick, [&] { return state_->num_running == 0; });
    }

    std::vector<RankFailure> failures() override {
        std::vector<RankFailure> failures;
        if (state_->whole.failed.load(std::memory_order_acquire)) {
            failures.push_back({-1, state_->whole.message});
        }
        for (size_t rank = 0; rank < state_->ends.size(); ++rank) {
            if (state_->ends[rank].failed.load(std::memory_order_acquire)) {
                failures.push_back({static_cast<int>(rank), state_->ends[rank].message});
            } else if (hanging_ && !state_->ends[rank].ended.load(std::memory_order_acquire)) {
                failures.push_back({static_cast<int>(rank), kHangs});
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
    explicit ProcessRun(std::optional<UniqueId> id = std::nullopt) : id_(std::move(id)) {}

    void start(const std::function<void()>& body) {
        ++num_ranks_;
        processes_.start([&] {
            RankEnd end{};
            run_recorded(end, body);
            return end.failed ? kFailed + end.message : std::string();
        });
    }

  protected:
    bool wait_a_while() override { return processes_.wait(kTick); }

    std::vector<RankFailure> failures() override {
        std::vector<RankFailure> failures;
        for (int rank = 0; rank < num_ranks_; ++rank) {
            const auto process = static_cast<size_t>(rank);
            if (!processes_.has_ended(process)) continue;
            const std::string& report = processes_.report(process);
            const std::string end = processes_.how_it_ended(process);
            if (!report.empty()) {
                failures.push_back({rank, report.substr(1)});
            } else if (processes_.was_killed_here(process)) {
                failures.push_back({rank, kHangs});
            } else if (!end.empty()) {
                failures.push_back({rank, "the process " + end});
            }
        }
        return failures;
    }

    void give_up() override { processes_.kill(); }

  private:
    static constexpr char kFailed = '!';  // before the message in a report; without a failure the report is empty

    std::optional<UniqueId> id_;  // if the ranks join with one
    Processes processes_;
    int num_ranks_ = 0;
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
    std::optional<Clock::time_point> deadline;
    while (!wait_a_while()) {
        tick();
        if (!deadline && !failures().empty())
            deadline = Clock::now() + std::chrono::microseconds(static_cast<int64_t>(grace_s * 1e6));
        if (!deadline || Clock::now() <= *deadline) continue;
        give_up();
        break;
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
    auto run = std::make_unique<ProcessRun>(std::move(owner));
    for (int rank = 0; rank < num_ranks; ++rank) {
        run->start([&] {
            const Communicator communicator = Communicator::join(id, num_ranks, rank);
            program(RankContext{rank, num_ranks, communicator.get()});
        });
    }
    return run;
}

std::unique_ptr<RankRun> start_hosts(int num_ranks, int ranks_per_host, RankProgram program) {
    // Below the ports that the system itself gives to connections.
    const std::string address = fmt::format("127.0.0.1:{}", 10'000 + getpid() % 20'000);
    auto run = std::make_unique<ProcessRun>();
    for (int rank = 0; rank < num_ranks; ++rank) {
        run->start([&] {
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
        run_recorded(state->whole,
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
