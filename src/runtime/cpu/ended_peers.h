// SPDX-License-Identifier: Apache-2.0
// Knows which ranks' processes have ended, so that warps that wait for them need not wait for the timeout, and which
// rank they are to name.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "device/platform.h"

namespace crossdock::cpu {

// What a communicator knows and says of lost ranks. Thread safe.
class PeerLosses {
  public:
    virtual ~PeerLosses() = default;
    // Whether the rank has ended, or left.
    virtual bool has_ended(int rank) = 0;
    // The rank to name if `rank` has ended: itself, or the one whose loss it reported.
    virtual int rank_to_name(int rank) = 0;
    // This rank fails because it has lost `rank`: reports it to all peers.
    virtual void report_loss(int rank) = 0;
};

// Thread safe. For the ranks of one communicator.
class EndedPeers {
  public:
    // losses: must outlive this.
    EndedPeers(int num_ranks, PeerLosses& losses);
    // look() looks at most once per interval.
    EndedPeers(int num_ranks, PeerLosses& losses, uint64_t interval_ns);

    // Call it while all warps wait. Checks all ranks, but takes at most 1 % of the time, unless an interval is given.
    void look();

    // A warp calls this after a failed poll for the peer; told: the warp's own, initially 0. Returns -1 while the peer
    // is alive, and for one more poll after its end, since it may have written before. Then returns the rank to name.
    int rank_to_name(int peer, uint32_t& told) const {
        const uint32_t count = num_ended_.load(std::memory_order_acquire);
        if (count == 0) return -1;
        const uint32_t number = numbers_[static_cast<size_t>(peer)].load(std::memory_order_relaxed);
        if (number != 0 && number <= told) return losses_.rank_to_name(peer);
        told = count;
        return -1;
    }

    void report_loss(int rank) { losses_.report_loss(rank); }

  private:
    int num_ranks_;
    PeerLosses& losses_;
    uint64_t interval_ns_;
    std::atomic<uint64_t> next_look_ns_{0};
    std::mutex looking_;
    std::unique_ptr<std::atomic<uint32_t>[]> numbers_;  // in the order in which ends were found, from 1; 0: alive
    std::atomic<uint32_t> num_ended_{0};
};

}  // namespace crossdock::cpu
