// SPDX-License-Identifier: Apache-2.0
// Knows which ranks' processes have ended, so that warps that wait for them need not wait for the timeout.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "device/platform.h"

namespace crossdock::cpu {

// kLeft: it left in order, perhaps because another rank was lost.
enum class PeerEnd { kNone, kLeft, kLost };

// Thread safe. For the ranks of one communicator.
class EndedPeers {
  public:
    // end_of: returns whether and how the rank has ended.
    EndedPeers(int num_ranks, std::function<PeerEnd(int rank)> end_of);

    // Call it while all warps wait. Checks all ranks, but takes at most 1 % of the time.
    void look();

    // A warp calls this after a failed poll for the peer; told: the warp's own, initially 0. Returns -1 while the peer
    // is alive, and for one more poll after its end, since it may have written before. Then returns the rank that was
    // found first, because of which others may have left; of those found by one look(), one that was lost.
    int first_ended(int peer, uint32_t& told) const {
        const uint32_t count = num_ended_.load(std::memory_order_acquire);
        if (count == 0) return -1;
        const uint32_t number = numbers_[static_cast<size_t>(peer)].load(std::memory_order_relaxed);
        if (number != 0 && number <= told) return first_;
        told = count;
        return -1;
    }

  private:
    int num_ranks_;
    std::function<PeerEnd(int rank)> end_of_;
    uint64_t interval_ns_;
    std::atomic<uint64_t> next_look_ns_{0};
    std::mutex looking_;
    std::unique_ptr<std::atomic<uint32_t>[]> numbers_;  // in the order in which ends were found, from 1; 0: alive
    std::atomic<uint32_t> num_ended_{0};
    int first_ = -1;
};

}  // namespace crossdock::cpu
