// SPDX-License-Identifier: Apache-2.0
// Ranks as processes: each runs a function, and they can exchange bytes and wait for each other without the network.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace crossdock::network {

inline constexpr int kMaxTestRanks = 16;

struct SharedState;

class TestRank {
  public:
    TestRank(SharedState& state, int rank, int num_ranks) : state_(&state), rank_(rank), num_ranks_(num_ranks) {}
    int rank() const { return rank_; }
    int num_ranks() const { return num_ranks_; }

    void barrier();
    // Every rank's 128 bytes, from all of them.
    std::vector<std::vector<std::byte>> exchange(const void* bytes);

    // Flags between some of the ranks.
    void raise(int flag);
    void await(int flag);

    // Records a failure; the rank continues.
    void fail(const std::string& message);
    void expect(bool condition, const std::string& message) {
        if (!condition) fail(message);
    }

    pid_t process_of(int rank) const;

  private:
    SharedState* state_;
    int rank_;
    int num_ranks_;
};

// What frames cross in this run: CROSSDOCK_TEST_HOSTS is not set, or "ucx", or set.
enum class Across { kMemory, kUcx, kLinks };
bool is_across(Across what);

// Lets this process use UCX's shared memory between hosts, in the place of RDMA.
void use_ucx_memory();

using RankFunction = std::function<void(TestRank& rank)>;

// Runs `function` once per rank, each in a process of its own, and reports failures as those of the running test. Ranks
// in `may_die` may end by a signal.
void run_ranks(int num_ranks, const RankFunction& function, const std::vector<int>& may_die = {});

}  // namespace crossdock::network
