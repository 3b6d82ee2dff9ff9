// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <time.h>

#include <atomic>
#include <cstdint>

namespace crossdock::cpu {

inline uint64_t steady_now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

// A thread's own time, which counts at most this much between two looks. A rank that was stopped for longer, perhaps
// with all others, has not waited for them meanwhile.
inline constexpr uint64_t kMostUnseenNs = 100'000'000;
inline uint64_t own_now_ns() {
    // Atomic, since ThreadSanitizer takes a thread's fibers for threads.
    thread_local std::atomic<uint64_t> t_seen_ns{0}, t_unseen_ns{0};
    constexpr auto kRelaxed = std::memory_order_relaxed;
    const uint64_t now_ns = steady_now_ns();
    const uint64_t seen_ns = t_seen_ns.load(kRelaxed);
    uint64_t unseen_ns = t_unseen_ns.load(kRelaxed);
    if (seen_ns != 0 && now_ns > seen_ns + kMostUnseenNs) {
        unseen_ns += now_ns - seen_ns - kMostUnseenNs;
        t_unseen_ns.store(unseen_ns, kRelaxed);
    }
    t_seen_ns.store(now_ns, kRelaxed);
    return now_ns - unseen_ns;
}

// The clock of waits for ranks, but for the simulation's. Tests set another one (tests/backends/patient_clock.h).
inline std::atomic<uint64_t (*)()> wait_clock{&own_now_ns};
inline uint64_t wait_now_ns() { return wait_clock.load(std::memory_order_relaxed)(); }

// Deadlines must not wrap around.
inline uint64_t saturating_add(uint64_t a, uint64_t b) { return a > UINT64_MAX - b ? UINT64_MAX : a + b; }

}  // namespace crossdock::cpu
