// SPDX-License-Identifier: Apache-2.0
// A connection of the rendezvous that stays open until its two ranks have met all others. It shows each whether the
// other one is still there, before they have a link. What they say there is sealed, as in the rendezvous.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "network/noise.h"
#include "network/socket.h"

namespace crossdock::network {

class Lifeline {
  public:
    // peer: the rank at the other end.
    Lifeline(Socket socket, NoiseSession session, uint32_t peer);

    // What to poll for input; -1: the other end says nothing more.
    int fd() const { return socket_.fd(); }

    // At most once: this rank fails because it has lost `lost`; kNoRank: it has met all. Does not block.
    void say(uint32_t lost);

    // The rank that the peer says it has lost, or kNoRank if it has met all; the peer itself if the connection has
    // ended without such words. nullopt: nothing has come, or it was heard before.
    std::optional<uint32_t> hear();

  private:
    Socket socket_;
    NoiseSession session_;
    uint32_t peer_;
    std::vector<std::byte> received_;
};

}  // namespace crossdock::network
