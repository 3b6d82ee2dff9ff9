// SPDX-License-Identifier: Apache-2.0
// How ranks that know each other's addresses connect: one link per pair, over which they prove that they belong to the
// same communicator and exchange a few bytes, encrypted (greeting.h). Links are TCP connections, within a host Unix
// sockets. Connections that do not authenticate are closed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "network/crypto.h"
#include "network/lifeline.h"
#include "network/socket.h"

namespace crossdock::network {

// A rank's address, which the caller sends to all others. Nothing in it is secret, but who can change it on its way can
// take a rank's place, unless ranks have a common secret. Fits NCCL's handles of 128 bytes.
struct RankAddress {
    char magic[8];
    uint32_t version;
    uint32_t reserved;
    Endpoint endpoint;
    Key key;           // proves that a process has made this address: Identity::keys.shared
    uint64_t host;     // the same for two ranks that can share memory
    uint64_t network;  // the same for two ranks of one network namespace
    LocalName local;   // for ranks of the same host and network
};
static_assert(sizeof(RankAddress) <= 128 && std::is_trivially_copyable_v<RankAddress>);

// With what a rank proves who it is.
struct Identity {
    KeyPair keys;
    Key secret;  // common to all ranks: secret_of()
};

// From CROSSDOCK_SECRET's text, which may be empty.
Key secret_of(const std::string& text);

// The sockets on which a rank listens during meet(), and its identity. Its port is closed before and after, and always
// if no rank of another host dials.
class Listener {
  public:
    // `interfaces` as own_address takes it. secret: CROSSDOCK_SECRET, or empty.
    explicit Listener(const char* interfaces, const std::string& secret = {});
    // On a free port of this address.
    explicit Listener(const Endpoint& own, const std::string& secret = {});
    const RankAddress& address() const { return address_; }
    const Identity& identity() const { return identity_; }
    const Socket& remote() const { return remote_; }
    const Socket& local() const { return local_; }

    // Shows during meet() whether that rank is there.
    void keep(uint32_t rank, std::unique_ptr<Lifeline> lifeline) { lifelines_[rank] = std::move(lifeline); }
    // null: none.
    Lifeline* lifeline(uint32_t rank) const {
        const auto found = lifelines_.find(rank);
        return found == lifelines_.end() ? nullptr : found->second.get();
    }

  private:
    Identity identity_;
    RankAddress address_;
    Socket remote_;
    Socket local_;  // listens from the beginning, so a refused connection means that the rank is gone
    std::map<uint32_t, std::unique_ptr<Lifeline>> lifelines_;
};

// Whether two ranks' link is a Unix socket.
bool is_local(const RankAddress& a, const RankAddress& b);

// Equal for two ranks that can share memory: same kernel, PID and IPC namespace. Different values of CROSSDOCK_HOST
// make processes of one host act as several hosts.
uint64_t host_identity();

// Throws ncclInvalidArgument if these are not the bytes of a RankAddress.
RankAddress read_address(const void* bytes);

struct Link {
    Socket socket;                // this rank's own link: closed
    std::vector<std::byte> blob;  // what the peer sent
    // Random, and known to these two ranks only: keys of frames to and from the peer.
    uint64_t key_out = 0;
    uint64_t key_in = 0;
};

inline constexpr size_t kMaxBlobBytes = size_t{64} << 10;

// Collective over the ranks with these addresses; returns one link per rank. Throws ncclRemoteError that names the
// ranks that did not connect within the timeout, and why; at once if a rank is known to have ended. A rank that fails
// first tells the others which rank it has lost, so that all name the same one.
std::vector<Link> meet(const Listener& listener, std::span<const RankAddress> addresses, uint32_t rank,
                       std::span<const std::byte> blob, uint64_t timeout_ns);

}  // namespace crossdock::network
