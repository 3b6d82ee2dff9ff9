// SPDX-License-Identifier: Apache-2.0
// One harness for all worlds: runs a program once a rank and gathers what went wrong.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "rank_context.h"

namespace crossdock::testing {

enum class WorldKind {
    kThreads,        // ranks are threads of this process
    kProcesses,      // ranks are processes, forked from this one
    kHosts,          // the same, which play hosts of ranks_per_host and are connected by the network
    kDeterministic,  // ranks are fibers of this thread, one seed is one run
    kGpu,            // ranks are threads of this process, on the GPUs there are
    kGpuProcesses    // ranks are processes, on the GPUs there are
};

const char* world_name(WorldKind kind);
inline bool is_gpu_world(WorldKind kind) { return kind == WorldKind::kGpu || kind == WorldKind::kGpuProcesses; }

class HostNetwork;

struct WorldSpec {
    WorldKind kind = WorldKind::kThreads;
    crossdockDeterministicConfig_t deterministic = CROSSDOCK_DETERMINISTIC_CONFIG_INIT;
    int ranks_per_host = 0;          // 0: all ranks are on one
    HostNetwork* network = nullptr;  // kHosts: the hosts are those of this network, instead of mere names
    std::vector<int> doomed;         // processes that a signal may end without a failure
    int limit_s = 120;               // processes still running then are killed, and it is a failure
};

struct RunReport {
    std::vector<std::string> failures;  // of all ranks, and of the world itself
    std::vector<uint64_t> digests;      // of each rank; 0 for one that died
    uint64_t num_steps = 0;             // deterministic
    bool ok() const { return failures.empty(); }
};

using RankProgram = std::function<void(RankContext&)>;

// Runs program on every rank and returns when all have ended. Exceptions of a program end it; all but StopProgram are
// failures. Processes are forked here, so the caller has no other threads then.
RunReport run_ranks(const WorldSpec& spec, int num_ranks, const RankProgram& program);

// Empty if the world can run here, else why not.
std::string why_unavailable(WorldKind kind);

}  // namespace crossdock::testing
