// SPDX-License-Identifier: Apache-2.0
#include "runtime/cpu/ended_peers.h"

#include <algorithm>

#include "runtime/cpu/clock.h"

namespace crossdock::cpu {
namespace {

constexpr uint64_t kLeastIntervalNs = 5'000'000;
constexpr uint64_t kNsPerRank = 100'000;  // has_ended() takes a system call or a lock

}  // namespace

EndedPeers::EndedPeers(int num_ranks, PeerLosses& losses)
    : EndedPeers(num_ranks, losses, std::max(kLeastIntervalNs, kNsPerRank * static_cast<uint64_t>(num_ranks))) {}

EndedPeers::EndedPeers(int num_ranks, PeerLosses& losses, uint64_t interval_ns)
    : num_ranks_(num_ranks),
      losses_(losses),
      interval_ns_(interval_ns),
      numbers_(std::make_unique<std::atomic<uint32_t>[]>(static_cast<size_t>(num_ranks))) {}

void EndedPeers::look() {
    const uint64_t now_ns = steady_now_ns();
    if (now_ns < next_look_ns_.load(std::memory_order_relaxed)) return;
    const std::unique_lock lock(looking_, std::try_to_lock);
    if (!lock.owns_lock()) return;
    next_look_ns_.store(now_ns + interval_ns_, std::memory_order_relaxed);
    uint32_t count = num_ended_.load(std::memory_order_relaxed);
    for (int rank = 0; rank < num_ranks_; ++rank) {
        std::atomic<uint32_t>& number = numbers_[static_cast<size_t>(rank)];
        if (number.load(std::memory_order_relaxed) == 0 && losses_.has_ended(rank))
            number.store(++count, std::memory_order_relaxed);
    }
    num_ended_.store(count, std::memory_order_release);
}

}  // namespace crossdock::cpu
