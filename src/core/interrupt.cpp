// SPDX-License-Identifier: Apache-2.0
#include "core/interrupt.h"

#include <atomic>
#include <chrono>

namespace crossdock {
namespace {

// Short for a user who has pressed Ctrl-C, long for a check that takes a lock of the program.
constexpr uint64_t kLookNs = 50'000'000;

std::atomic<InterruptCheck> g_check{nullptr};

uint64_t now_ns() {
    return static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
            .count());
}

}  // namespace

void set_interrupt_check(InterruptCheck check) { g_check.store(check, std::memory_order_release); }

bool Interruption::has_come() {
    const InterruptCheck check = g_check.load(std::memory_order_acquire);
    if (check == nullptr || has_come_) return has_come_;
    const uint64_t now = now_ns();
    if (now < next_look_ns_) return false;
    has_come_ = next_look_ns_ != 0 && check() != 0;
    next_look_ns_ = now_ns() + kLookNs;
    return has_come_;
}

}  // namespace crossdock
