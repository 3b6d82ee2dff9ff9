// SPDX-License-Identifier: Apache-2.0
// The links over which ranks met stay open. They tell who is still there: a link carries a goodbye when a rank leaves
// in order, and ends without one when a rank dies. And they carry the frames of ranks that nothing faster connects.
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
    Farewell farewell;
};

class PeerLinks {
  public:
    PeerLinks(std::vector<Link> links, FrameReceiver& receiver);

    // Frames to this peer go over its link: progress() looks for those that come from there, look_at_all() does at all.
    void carry_frames(uint32_t peer) { carriers_.push_back(peer); }

    // As LinkStream's.
    ucs_status_t send(uint32_t peer, Send& send);

    // Sends what is queued, and hands out what came over links that carry frames. True if something came.
    bool progress(std::vector<Departure>& departures);
    // Looks at all links. For now and then: it asks the system about links that are mostly silent.
    void look_at_all(std::vector<Departure>& departures);

    // Ends the link to a peer that is lost. Not while a frame is being handed out.
    void drop(uint32_t peer);

    // Tells all others that this rank leaves in order, perhaps because it has lost another.
    void say_goodbye(uint32_t because_of);
    bool is_flushed() const { return queued_.empty(); }
    // Behind a goodbye: waits, at most so long, until the ranks there have read all that was sent to them.
    void part(const std::vector<bool>& is_there, uint64_t timeout_ns);

  private:
    bool receive(uint32_t peer, std::vector<Departure>& departures);
    void flush_all();
    void close(uint32_t peer);

    std::deque<LinkStream> streams_;  // one per rank; this rank's own is closed
    FrameReceiver& receiver_;
    std::vector<uint32_t> carriers_;
    std::vector<uint32_t> queued_;  // peers for which something is queued
    Socket epoll_;
};

}  // namespace crossdock::network
