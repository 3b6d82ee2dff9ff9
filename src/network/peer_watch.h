// SPDX-License-Identifier: Apache-2.0
// Who is still there: the links of the handshake stay open, carry one byte when a rank leaves in order, and end without
// it when a rank dies.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "network/handshake.h"

namespace crossdock::network {

struct Departure {
    uint32_t rank;
    bool in_order;
    std::string reason;  // of one that is not in order
};

class PeerWatch {
  public:
    explicit PeerWatch(std::vector<Link> links);
    ~PeerWatch();
    PeerWatch(const PeerWatch&) = delete;
    PeerWatch& operator=(const PeerWatch&) = delete;

    // Who left since the last call; cheap, never waits.
    std::vector<Departure> poll();

    // Tells all others that this rank leaves in order.
    void say_goodbye();

  private:
    void read_link(uint32_t rank, std::vector<Departure>& departures);

    std::vector<Link> links_;
    int epoll_ = -1;
};

}  // namespace crossdock::network
