// SPDX-License-Identifier: Apache-2.0
// Runs a kernel's program once per rank, over threads or in the simulator, and returns the first message of a failure.
#pragma once

#include <cstdlib>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "crossdock/device/kernel.hpp"

struct Rank {
    ncclComm_t comm;
    int rank, num_ranks;
};

// What a test needs of a rank: a device communicator and a window of 4096 bytes. launch runs the kernel there.
struct TestRank {
    Rank self;
    ncclDevComm comm;
    void* memory = nullptr;
    ncclWindow_t window = nullptr;
    ncclLLA2AHandle all_to_all = {};
};

struct Setup {
    int ranks = 2;
    int signals = 4, counters = 2, barriers = 2;
    int lsa_team = 0;  // 0: all ranks
    int queue_depth = 0;
    ncclGinConnectionType_t connection = NCCL_GIN_CONNECTION_FULL;
    bool strong_signals = true, va_signals = true;
    int all_to_all_slots = 0;          // of each of two blocks; 0: no small all-to-alls
    std::vector<uint64_t> words = {};  // what the window begins with, and repeats; empty: zeros
};
using Body = std::function<ncclResult_t(TestRank&)>;

// What ranks that fail leave behind: they do so at different times, so not all of them make the collective calls. A
// device communicator keeps its simulation alive, and the memory of many runs would use up the process's mappings.
class LeftBehind {
  public:
    void add(const TestRank& rank) {
        const std::lock_guard lock(mutex_);
        ranks_.push_back(rank);
    }
    // When all ranks have ended.
    void free() {
        for (const TestRank& rank : ranks_) {
            crossdockDevCommDestroy(nullptr, rank.comm.crossdockId);
            crossdockMemFree(rank.comm.crossdockResources);
            crossdockMemFree(rank.memory);
        }
        ranks_.clear();
    }

  private:
    std::mutex mutex_;
    std::vector<TestRank> ranks_;
};
inline LeftBehind& left_behind() {
    static LeftBehind instance;
    return instance;
}

// "": body succeeded.
inline std::string run_rank(const Setup& setup, const Rank& self, const Body& body) {
    TestRank rank{self, {}};
    const auto is_good = [](ncclResult_t result) { return result == ncclSuccess; };
    ncclDevCommRequirements reqs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
    reqs.ginConnectionType = setup.connection;
    reqs.ginSignalCount = setup.signals;
    reqs.ginCounterCount = setup.counters;
    reqs.barrierCount = reqs.lsaBarrierCount = setup.barriers;
    reqs.ginContextCount = 2;
    reqs.ginQueueDepth = setup.queue_depth;
    reqs.ginStrongSignalsRequired = setup.strong_signals;
    reqs.ginVaSignalsRequired = setup.va_signals;
    if (setup.connection != NCCL_GIN_CONNECTION_NONE) reqs.railGinBarrierCount = setup.barriers;
    if (setup.connection == NCCL_GIN_CONNECTION_FULL) reqs.worldGinBarrierCount = setup.barriers;
    ncclDevResourceRequirements all_to_all;
    if (setup.all_to_all_slots > 0 &&
        is_good(ncclLLA2ACreateRequirement(2, setup.all_to_all_slots, &rank.all_to_all, &all_to_all))) {
        reqs.resourceRequirementsList = &all_to_all;
    }
    if (!is_good(ncclMemAlloc(&rank.memory, 4096))) return crossdockGetLastError();
    // Before the others know of the window.
    for (size_t i = 0; i < 4096 / 8 && !setup.words.empty(); ++i) {
        static_cast<uint64_t*>(rank.memory)[i] = setup.words[i % setup.words.size()];
    }
    if (!is_good(ncclCommWindowRegister(self.comm, rank.memory, 4096, &rank.window, NCCL_WIN_DEFAULT)) ||
        !is_good(ncclDevCommCreate(self.comm, &reqs, &rank.comm))) {
        return crossdockGetLastError();
    }
    const std::string failure = is_good(body(rank)) ? "" : crossdockGetLastError();
    if (!failure.empty()) left_behind().add(rank);
    if (failure.empty() &&
        (!is_good(ncclDevCommDestroy(self.comm, &rank.comm)) ||
         !is_good(ncclCommWindowDeregister(self.comm, rank.window)) || !is_good(ncclMemFree(rank.memory)))) {
        return crossdockGetLastError();
    }
    return failure;
}

struct LsaTeam {
    explicit LsaTeam(int size) {
        if (size > 0) setenv("NCCL_LSA_TEAM_SIZE", std::to_string(size).c_str(), 1);
    }
    ~LsaTeam() { unsetenv("NCCL_LSA_TEAM_SIZE"); }
};

// The ranks' failures.
inline std::string on_threads(const Setup& setup, const Body& body) {
    const LsaTeam team(setup.lsa_team);
    std::vector<ncclComm_t> comms(static_cast<size_t>(setup.ranks));
    if (crossdockCommInitAll(comms.data(), setup.ranks) != ncclSuccess) return crossdockGetLastError();
    std::vector<std::string> failures(comms.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < comms.size(); ++i) {
        threads.emplace_back([&, i] {
            failures[i] = run_rank(setup, {comms[i], static_cast<int>(i), setup.ranks}, body);
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (ncclComm_t comm : comms) crossdockCommDestroy(comm);
    left_behind().free();
    std::string all;
    for (const std::string& failure : failures) {
        if (!failure.empty()) all += (all.empty() ? "" : "; ") + failure;
    }
    return all;
}

// The simulator's verdict, or else a rank's failure.
inline std::string in_simulation(const Setup& setup, uint64_t seed, const Body& body) {
    const LsaTeam team(setup.lsa_team);
    struct Run {
        const Setup& setup;
        const Body& body;
        std::string failure;
    } run{setup, body, ""};
    crossdockSimulationConfig_t config = CROSSDOCK_SIMULATION_CONFIG_INIT;
    config.seed = seed;
    const ncclResult_t result = crossdockRunSimulation(
        setup.ranks, &config,
        [](ncclComm_t comm, int rank, void* context) {
            Run& its_run = *static_cast<Run*>(context);
            const std::string failure = run_rank(its_run.setup, {comm, rank, its_run.setup.ranks}, its_run.body);
            if (its_run.failure.empty()) its_run.failure = failure;
        },
        &run, nullptr);
    std::string failure = result == ncclSuccess ? run.failure : crossdockGetLastError();
    left_behind().free();
    return failure;
}

// The first failure of the seeds 0..count-1, or "".
inline std::string in_simulations(const Setup& setup, uint64_t count, const Body& body) {
    for (uint64_t seed = 0; seed < count; ++seed) {
        std::string failure = in_simulation(setup, seed, body);
        if (!failure.empty()) return failure;
    }
    return "";
}

// A body that launches a kernel with the rank's communicator, its window and further arguments.
template <typename... Parameters, typename... Arguments>
Body launching(dim3 grid, dim3 block, void (*kernel)(ncclDevComm, ncclWindow_t, Parameters...),
               Arguments... arguments) {
    return [=](TestRank& rank) {
        return crossdockLaunch(rank.self.comm, grid, block, 0, nullptr, kernel, rank.comm, rank.window, arguments...);
    };
}
