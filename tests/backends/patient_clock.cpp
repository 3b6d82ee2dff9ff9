// SPDX-License-Identifier: Apache-2.0
#include "backends/patient_clock.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <stdexcept>

#include "runtime/cpu/clock.h"

namespace crossdock::testing {
namespace {

using cpu::steady_now_ns;

constexpr int kMostRanks = 64;
// A timeout of 200 ms takes 20 steps: as often a rank that waits has polled before another one loses it. Smaller steps
// would make tests slow on a busy machine.
constexpr uint64_t kMostStepNs = 10'000'000;

struct State {
    int num_ranks;
    std::atomic<uint64_t> now_ns;
    std::atomic<uint64_t> moved_at_ns;          // in real time
    std::atomic<uint64_t> seen_ns[kMostRanks];  // the time at which the rank last looked
    std::atomic<bool> has_ended[kMostRanks];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

State* g_state = nullptr;  // shared memory
thread_local int t_rank = -1;

bool all_have_seen(const State& state, uint64_t now_ns) {
    for (int rank = 0; rank < state.num_ranks; ++rank) {
        if (!state.has_ended[rank] && state.seen_ns[rank] != now_ns) return false;
    }
    return true;
}

uint64_t look() {
    if (t_rank < 0) return cpu::own_now_ns();
    State& state = *g_state;
    const uint64_t now_ns = state.now_ns;
    state.seen_ns[t_rank] = now_ns;
    if (!all_have_seen(state, now_ns)) return now_ns;
    const uint64_t real_ns = steady_now_ns();
    const uint64_t moved_at_ns = state.moved_at_ns;
    const uint64_t passed_ns = real_ns > moved_at_ns ? std::min(real_ns - moved_at_ns, kMostStepNs) : 1;
    uint64_t expected = now_ns;
    if (state.now_ns.compare_exchange_strong(expected, now_ns + passed_ns)) state.moved_at_ns = real_ns;
    return now_ns;
}

}  // namespace

PatientClock::PatientClock(int num_ranks) {
    if (num_ranks > kMostRanks || g_state != nullptr) throw std::logic_error("too many ranks or patient clocks");
    void* memory = mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    g_state = new (memory) State{};
    g_state->num_ranks = num_ranks;
    g_state->now_ns = g_state->moved_at_ns = steady_now_ns();
    cpu::wait_clock = &look;
}

PatientClock::~PatientClock() {
    cpu::wait_clock = &cpu::own_now_ns;
    munmap(g_state, sizeof(State));
    g_state = nullptr;
}

void PatientClock::start(int rank) { t_rank = rank; }

void PatientClock::end(int rank) {
    if (g_state != nullptr) g_state->has_ended[rank] = true;
}

}  // namespace crossdock::testing
