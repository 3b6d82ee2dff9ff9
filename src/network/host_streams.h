// SPDX-License-Identifier: Apache-2.0
// Frames between the ranks of a host, through memory that both processes map. It is anonymous, belongs to this user
// only, has no name, and is freed with the last process that uses it, however that ends.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "network/frame_stream.h"
#include "network/host_ring.h"
#include "network/peer_links.h"

namespace crossdock::network {

class HostStreams {
  public:
    // `on_host`: which ranks are of this one's host. Throws ncclSystemError if there is no memory for the inbox.
    HostStreams(const std::vector<bool>& on_host, uint32_t rank, FrameReceiver& receiver);
    ~HostStreams();

    // What the peers need to write to this rank, in bytes. Empty bytes: a rank that has no inbox.
    std::vector<std::byte> offer() const;

    // Returns true if frames to this peer go through its inbox from now on; false if it has none, or this process
    // cannot open it. Throws ncclRemoteError that names the rank if it offered something else than an inbox.
    bool connect(uint32_t peer, std::span<const std::byte> offer);

    // As FrameStream's.
    ucs_status_t send(uint32_t peer, Send& send);

    // Sends what is queued, and receives. True if anything was received. Departures: of peers whose bytes make no
    // sense.
    bool progress(std::vector<Departure>& departures);
    bool is_flushed() const;

    // A peer has left: cancels sends to it. What it has sent before is still received, by receive_rest().
    void stop_sending(uint32_t peer);
    void receive_rest(uint32_t peer, std::vector<Departure>& departures);
    // Also cancels what is being received. Not while a frame is being handed out.
    void drop(uint32_t peer);

  private:
    class Stream;
    bool receive(Stream& stream, std::vector<Departure>& departures);

    uint32_t rank_;
    std::vector<bool> on_host_;
    FrameReceiver& receiver_;
    HostInbox inbox_;
    std::vector<std::unique_ptr<Stream>> streams_;  // per rank; null: of another host, or this rank's own
    std::vector<Stream*> of_peers_;                 // those that are not null
};

}  // namespace crossdock::network
