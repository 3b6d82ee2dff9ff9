// SPDX-License-Identifier: Apache-2.0
// Whom a listening socket lets in: a bounded number of connections that have yet to prove who they are. While places
// are short, whoever takes long loses his, so a rank, which proves itself at once, gets in whatever strangers do.
#pragma once

#include <cstdint>
#include <string>

#include "network/socket.h"

namespace crossdock::network {

class Door {
  public:
    static constexpr size_t kMaxStrangers = 128;
    static constexpr uint64_t kPatienceNs = 10'000'000'000;
    static constexpr uint64_t kShortPatienceNs = 250'000'000;

    // A listening socket, which must outlive this.
    explicit Door(const Socket& socket) : socket_(socket) {}

    // What to poll: -1 while nobody may come in.
    int fd(size_t num_strangers, uint64_t now_ns) const { return is_full(num_strangers, now_ns) ? -1 : socket_.fd(); }
    // So long may a stranger take to prove who he is.
    uint64_t patience_ns(size_t num_strangers, uint64_t now_ns) const {
        return is_full(num_strangers, now_ns) ? kShortPatienceNs : kPatienceNs;
    }
    // The next who waits; a closed socket when nobody does, or nobody may come in.
    Socket let_in(size_t num_strangers, uint64_t now_ns);

    // "; ..." what made this process turn connections away, empty if nothing did: the end of a message.
    const std::string& trouble() const { return trouble_; }

  private:
    bool is_full(size_t num_strangers, uint64_t now_ns) const {
        return num_strangers >= kMaxStrangers || now_ns < closed_until_ns_;
    }

    const Socket& socket_;
    uint64_t closed_until_ns_ = 0;
    std::string trouble_;
};

}  // namespace crossdock::network
