// SPDX-License-Identifier: Apache-2.0
// Limits how many unauthenticated connections a listening socket accepts. At the limit, slow connections are closed
// early, so a rank, which authenticates at once, still gets in during a flood.
#pragma once

#include <cstdint>
#include <string>

#include "network/socket.h"

namespace crossdock::network {

class Acceptor {
  public:
    static constexpr size_t kMaxUnauthenticated = 128;
    static constexpr uint64_t kTimeoutNs = 10'000'000'000;
    static constexpr uint64_t kShortTimeoutNs = 250'000'000;

    // The socket must outlive this. listens: of one that does not, poll() reports a hang-up at once, again and again.
    explicit Acceptor(const Socket& socket, bool listens = true) : socket_(socket), listens_(listens) {}

    bool listens() const { return listens_; }
    // What to poll: -1 where nothing is accepted, and at the limit.
    int fd(size_t num_unauthenticated, uint64_t now_ns) const {
        return accepts(num_unauthenticated, now_ns) ? socket_.fd() : -1;
    }
    // How long a connection may stay unauthenticated.
    uint64_t timeout_ns(size_t num_unauthenticated, uint64_t now_ns) const {
        return is_full(num_unauthenticated, now_ns) ? kShortTimeoutNs : kTimeoutNs;
    }
    // Accepts the next connection. Returns a closed socket if none is pending or the limit is reached.
    Socket accept(size_t num_unauthenticated, uint64_t now_ns);

    // Message suffix ("; ...") that says why connections could not be accepted; empty: all could.
    const std::string& trouble() const { return trouble_; }

  private:
    bool accepts(size_t num_unauthenticated, uint64_t now_ns) const {
        return listens_ && !is_full(num_unauthenticated, now_ns);
    }
    bool is_full(size_t num_unauthenticated, uint64_t now_ns) const {
        return num_unauthenticated >= kMaxUnauthenticated || now_ns < closed_until_ns_;
    }

    const Socket& socket_;
    bool listens_;
    uint64_t closed_until_ns_ = 0;
    std::string trouble_;
};

}  // namespace crossdock::network
