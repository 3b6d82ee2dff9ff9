// SPDX-License-Identifier: Apache-2.0
#include "ranks.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string_view>
#include <thread>

#include "tools/common/processes.h"
#include "tools/common/shared_array.h"

namespace crossdock::network {

struct SharedState {
    std::atomic<int> entered;
    std::atomic<int> generation;
    std::atomic<bool> flags[64];
    std::byte handles[kMaxTestRanks][128];
    std::atomic<pid_t> processes[kMaxTestRanks];
    std::atomic<int> num_failures;
    char failures[32][512];
};

namespace {

constexpr auto kTimeout = std::chrono::seconds(100);

template <class Condition>
bool wait_for(Condition condition) {
    const auto end = std::chrono::steady_clock::now() + kTimeout;
    while (!condition()) {
        if (std::chrono::steady_clock::now() > end) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return true;
}

}  // namespace

bool is_across(Across what) {
    const char* value = std::getenv("CROSSDOCK_TEST_HOSTS");
    const std::string_view name = value == nullptr ? "" : value;
    return what == (name.empty() ? Across::kMemory : name == "ucx" ? Across::kUcx : Across::kLinks);
}

void use_ucx_memory() {
    setenv("UCX_TLS", "posix,cma", 1);
    setenv("UCX_POSIX_ERROR_HANDLING", "y", 1);
    setenv("UCX_CMA_ERROR_HANDLING", "y", 1);
}

void TestRank::barrier() {
    const int generation = state_->generation.load();
    if (state_->entered.fetch_add(1) + 1 == num_ranks_) {
        state_->entered = 0;
        ++state_->generation;
    } else if (!wait_for([&] { return state_->generation.load() != generation; })) {
        fail("a barrier was not reached by all");
        _exit(1);
    }
}

std::vector<std::vector<std::byte>> TestRank::exchange(const void* bytes) {
    std::memcpy(state_->handles[rank_], bytes, 128);
    barrier();
    std::vector<std::vector<std::byte>> all;
    for (int each = 0; each < num_ranks_; ++each) all.emplace_back(state_->handles[each], state_->handles[each] + 128);
    barrier();
    return all;
}

void TestRank::raise(int flag) { state_->flags[flag] = true; }

void TestRank::await(int flag) {
    if (wait_for([&] { return state_->flags[flag].load(); })) return;
    fail("flag " + std::to_string(flag) + " was not raised");
    _exit(1);
}

void TestRank::fail(const std::string& message) {
    const int place = state_->num_failures.fetch_add(1);
    if (place >= 32) return;
    const std::string text = "rank " + std::to_string(rank_) + ": " + message;
    std::strncpy(state_->failures[place], text.c_str(), sizeof(state_->failures[place]) - 1);
}

pid_t TestRank::process_of(int rank) const {
    wait_for([&] { return state_->processes[rank].load() != 0; });
    return state_->processes[rank];
}

void run_ranks(int num_ranks, const RankFunction& function, const std::vector<int>& may_die) {
    ASSERT_LE(num_ranks, kMaxTestRanks);
    tools::SharedArray<SharedState> shared(1);
    SharedState& state = shared[0];
    Processes processes;
    for (int rank = 0; rank < num_ranks; ++rank) {
        processes.start([&] {
            // Each rank plays a host of its own, so that frames cross TCP or UCX.
            if (is_across(Across::kLinks) || is_across(Across::kUcx))
                setenv("CROSSDOCK_HOST", std::to_string(rank).c_str(), 1);
            if (is_across(Across::kUcx)) use_ucx_memory();
            TestRank self(state, rank, num_ranks);
            state.processes[rank] = getpid();
            try {
                function(self);
                self.expect(!testing::Test::HasFailure(), "an assertion failed");
            } catch (const std::exception& error) {
                self.fail(std::string("an exception: ") + error.what());
            }
            return "";
        });
    }
    processes.wait();
    for (int rank = 0; rank < num_ranks; ++rank) {
        const bool may = std::find(may_die.begin(), may_die.end(), rank) != may_die.end();
        const std::string end = processes.how_it_ended(static_cast<size_t>(rank));
        EXPECT_TRUE(may || end.empty()) << "rank " << rank << " " << end;
    }
    for (int each = 0; each < std::min(state.num_failures.load(), 32); ++each) ADD_FAILURE() << state.failures[each];
}

}  // namespace crossdock::network
