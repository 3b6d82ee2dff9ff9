// SPDX-License-Identifier: Apache-2.0
#include "runtime/cpu/ended_peers.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "runtime/cpu/clock.h"

namespace crossdock::cpu {
namespace {

constexpr uint64_t kLeastIntervalNs = 5'000'000;
constexpr uint64_t kNsPerRank = 100'000;  // end_of() takes a system call or a lock

}  // namespace

EndedPeers::EndedPeers(int num_ranks, std::function<PeerEnd(int rank)> end_of)
    : num_ranks_(num_ranks),
      end_of_(std::move(end_of)),
      interval_ns_(std::max(kLeastIntervalNs, kNsPerRank * static_cast<uint64_t>(num_ranks))),
      numbers_(std::make_unique<std::atomic<uint32_t>[]>(static_cast<size_t>(num_ranks))) {}

void EndedPeers::look() {
    const uint64_t now_ns = steady_now_ns();
    if (now_ns < next_look_ns_.load(std::memory_order_relaxed)) return;
    const std::unique_lock lock(looking_, std::try_to_lock);
    if (!lock.owns_lock()) return;
    next_look_ns_.store(now_ns + interval_ns_, std::memory_order_relaxed);
    uint32_t count = num_ended_.load(std::memory_order_relaxed);
    const auto note = [&](int rank) {
        if (count == 0) first_ = rank;
        numbers_[static_cast<size_t>(rank)].store(++count, std::memory_order_relaxed);
    };
    std::vector<int> left;
    for (int rank = 0; rank < num_ranks_; ++rank) {
        if (numbers_[static_cast<size_t>(rank)].load(std::memory_order_relaxed) != 0) continue;
        const PeerEnd end = end_of_(rank);
        if (end == PeerEnd::kLost) note(rank);
        if (end == PeerEnd::kLeft) left.push_back(rank);
    }
    for (const int rank : left) note(rank);
    num_ended_.store(count, std::memory_order_release);
}

}  // namespace crossdock::cpu
