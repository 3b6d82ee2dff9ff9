// SPDX-License-Identifier: Apache-2.0
// The links of the handshake stay open. They show which ranks are alive: a rank that leaves in order sends a close
// notice, a rank that dies does not. They also carry the frames of ranks that nothing faster connects.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "network/handshake.h"
#include "network/link_stream.h"

namespace crossdock::network {

struct Departure {
    uint32_t rank;
    LinkEnd link_end;
};

class PeerLinks {
  public:
    PeerLinks(std::vector<Link> links, FrameReceiver& receiver);

    // Frames to this peer go over its link, and progress() receives from it.
    void carry_frames(uint32_t peer) { carriers_.push_back(peer); }

    // As LinkStream's.
    ucs_status_t send(uint32_t peer, Send& send);

    // Sends queued records, and receives from links that carry frames. True if anything was received.
    bool progress(std::vector<Departure>& departures);
    // Receives from all links. Call it rarely: it makes a system call for links that are mostly idle. A peer that sends
    // frames over its link, unexpectedly, goes on doing so: progress() receives from it, too.
    void look_at_all(std::vector<Departure>& departures);

    // The peer whose frame is being handed out; kNoRank: none.
    uint32_t receives_from() const { return receives_from_; }

    // Closes the link to a lost peer. Not while a frame is being handed out.
    void drop(uint32_t peer);

    // Tells all peers that this rank leaves in order. because_of: the lost rank that is the reason, or kNoRank.
    void send_close_notice(uint32_t because_of);
    // Tells all peers that this rank fails because it has lost `lost`; kNoRank: that this is over.
    void send_failure_report(uint32_t lost);
    // The latest report of the peer; kNoRank: none.
    uint32_t reported_loss(uint32_t peer) const { return streams_[peer].reported_loss(); }
    bool is_flushed() const { return queued_.empty(); }
    // After a close notice: waits until the peers have read all that was sent to them, at most timeout_ns.
    void part(const std::vector<bool>& is_there, uint64_t timeout_ns);

  private:
    bool receive(uint32_t peer, std::vector<Departure>& departures);
    void flush_all();
    void close(uint32_t peer);
    template <typename SendTo>
    void send_to_all(SendTo send_to);

    std::deque<LinkStream> streams_;  // one per rank; this rank's own is closed
    FrameReceiver& receiver_;
    uint32_t receives_from_ = kNoRank;
    std::vector<uint32_t> carriers_;
    std::vector<uint32_t> queued_;  // peers for which something is queued
    Socket epoll_;
};

}  // namespace crossdock::network
