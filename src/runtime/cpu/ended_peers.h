// SPDX-License-Identifier: Apache-2.0
// Which ranks' processes have ended, for warps that wait for them: they need not wait for their timeouts.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "device/platform.h"

namespace crossdock::cpu {

// kLeft: it took its leave, perhaps because of a lost one.
enum class PeerEnd { kNone, kLeft, kLost };

// Any number of threads, which wait for ranks of one communicator.
class EndedPeers {
  public:
    // end_of: whether anything more will come from the rank.
    EndedPeers(int num_ranks, std::function<PeerEnd(int rank)> end_of);

    // To be called while everything waits. Asks about all ranks, but only now and then: at most 1 % of the time goes
    // there.
    void look();

    // For a warp to call after a failed poll for the peer, with a number that is the warp's own and 0 at first. Where
    // the peer has ended: the rank that was the first to be found so, which the others may have left for; of those
    // found in one look, one that was lost. -1: it is alive, or the warp has not polled since it is known to have
    // ended, so that its last words would be missed.
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
    std::unique_ptr<std::atomic<uint32_t>[]> numbers_;  // in the order of their ends, from 1; 0: it is alive
    std::atomic<uint32_t> num_ended_{0};
    int first_ = -1;
};

}  // namespace crossdock::cpu
