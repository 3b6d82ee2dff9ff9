// SPDX-License-Identifier: Apache-2.0
// Idle strategy of a thread: spins for the lowest latency, then yields its core, and sleeps in long waits.
#pragma once

#include <sched.h>
#include <time.h>

#include <cstdint>
#include <thread>

#include "device/platform.h"
#include "runtime/cpu/clock.h"

namespace crossdock::cpu {

class IdleBackoff {
  public:
    explicit IdleBackoff(int num_spins) : num_spins_(num_spins) {}

    void reset() { num_idle_ = 0; }

    // One more idle round. Does not sleep close to deadline_ns, so that a timeout of 1 ms is precise.
    void idle(uint64_t deadline_ns) {
        if (num_idle_ < num_spins_) {
            ++num_idle_;
            relax();
        } else if (num_idle_ < num_spins_ + kNumYields) {
            ++num_idle_;
            sched_yield();
        } else {
            sleep_before(deadline_ns);
        }
    }

    // Spinning helps only if every thread has its own core. A rank may be bound to fewer cores than its share of the
    // machine.
    static int spins_for(int num_ranks, int threads_per_rank = 1) {
        cpu_set_t own;
        const bool is_bound = sched_getaffinity(0, sizeof(own), &own) == 0 && CPU_COUNT(&own) < threads_per_rank;
        const auto num_cores = static_cast<int>(std::thread::hardware_concurrency());
        return !is_bound && num_ranks * threads_per_rank <= num_cores ? 200 : 0;
    }

    static void relax() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

  private:
    static constexpr int kNumYields = 2000;  // about 1 ms if no other thread wants the core
    static constexpr uint64_t kSleepNs = 50'000;
    static constexpr uint64_t kSleepErrorNs = 100'000;  // more than the kernel's timer slack

    static void sleep_before(uint64_t deadline_ns) {
        if (deadline_ns < saturating_add(wait_now_ns(), kSleepNs + kSleepErrorNs)) {
            sched_yield();
            return;
        }
        const timespec duration{0, static_cast<long>(kSleepNs)};
        nanosleep(&duration, nullptr);
    }

    int num_spins_;
    int num_idle_ = 0;
};

}  // namespace crossdock::cpu
