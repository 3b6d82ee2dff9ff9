// SPDX-License-Identifier: Apache-2.0
// Who is still there: the links of the handshake stay open, carry a goodbye when a rank leaves in order, and end
// without one when a rank dies.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/process.h"
#include "network/handshake.h"

namespace crossdock::network {

inline constexpr uint32_t kNoRank = UINT32_MAX;

struct Departure {
    uint32_t rank;
    bool in_order;
    std::string reason;             // of one that is not in order
    uint32_t because_of = kNoRank;  // in order: for the loss of whom it leaves
};

class PeerWatch {
  public:
    explicit PeerWatch(std::vector<Link> links);
    ~PeerWatch();
    PeerWatch(const PeerWatch&) = delete;
    PeerWatch& operator=(const PeerWatch&) = delete;

    // Who left since the last call; cheap, never waits.
    std::vector<Departure> poll();

    // Tells all others that this rank leaves in order, perhaps because it has lost another.
    void say_goodbye(uint32_t because_of);

  private:
    void read_link(uint32_t rank, std::vector<Departure>& departures);
    void let_go() noexcept;

    std::vector<Link> links_;
    int epoll_ = -1;
    // Held while links are closed. A forked child closes its copies at once: while it has them open, peers do not see
    // this process end.
    ForkSafeMutex closing_{[this] { let_go(); }};
};

}  // namespace crossdock::network
