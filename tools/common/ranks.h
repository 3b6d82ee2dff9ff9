// SPDX-License-Identifier: Apache-2.0
// Starting a tool's ranks, as threads, processes or fibers of one thread, and never waiting for ever for one of them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "crossdock.h"
#include "tools/common/backend.h"

namespace crossdock::tools {

// What a rank's program gets. `host` is a CPU communicator of all ranks: the group's own in the CPU backends, and the
// host side's meeting place (barriers, exchanging ids and results) for ranks on GPUs.
struct RankContext {
    int rank = 0;
    int num_ranks = 1;
    ncclComm_t host = nullptr;
};

// Fails by throwing a std::exception, whose what() is the rank's message.
using RankProgram = std::function<void(const RankContext&)>;

// rank -1: the run as a whole.
struct RankFailure {
    int rank;
    std::string message;
};

// Ranks that were started.
class RankRun {
  public:
    virtual ~RankRun() = default;

    // Returns when all ranks have ended, calling `tick` some 50 times a second meanwhile. After the first failure the
    // others have grace_s seconds left to end by themselves; then processes are killed, and threads reported as
    // hanging: a program whose threads hang must leave with std::_Exit.
    std::vector<RankFailure> wait(const std::function<void()>& tick, double grace_s);

  protected:
    virtual bool wait_a_while() = 0;  // true: all have ended
    virtual std::vector<RankFailure> failures() = 0;
    virtual void give_up() = 0;
};

struct StartOptions {
    int num_ranks = 1;
    int ranks_per_host = 1;  // hosts
    uint64_t seed = 0;       // simulation
};

// Ranks of any backend. With GPUs they are threads or processes, which choose their GPUs themselves.
std::unique_ptr<RankRun> start_ranks(Backend backend, const StartOptions& options, RankProgram program);

std::unique_ptr<RankRun> start_threads(int num_ranks, RankProgram program);

// Forks: the caller must not have started threads. What the ranks are to hand back goes through memory shared before.
std::unique_ptr<RankRun> start_processes(int num_ranks, RankProgram program);

// The same; each ranks_per_host processes play a host of their own, and reach the others over the network.
std::unique_ptr<RankRun> start_hosts(int num_ranks, int ranks_per_host, RankProgram program);

std::unique_ptr<RankRun> start_simulation(int num_ranks, uint64_t seed, RankProgram program);

// "rank 3: ..." or just the message.
std::string to_string(const RankFailure& failure);

}  // namespace crossdock::tools
