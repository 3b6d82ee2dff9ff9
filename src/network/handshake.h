// SPDX-License-Identifier: Apache-2.0
// How ranks that know each other's addresses connect: one link per pair, over which they prove that they belong to the
// same communicator and exchange a few bytes. Links are TCP connections, within a host Unix sockets. Connections that
// do not authenticate are closed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "network/secret.h"
#include "network/socket.h"

namespace crossdock::network {

// A rank's address, which the caller sends to all others. Fits NCCL's handles of 128 bytes.
struct RankAddress {
    char magic[8];
    uint32_t version;
    uint32_t reserved;
    Endpoint endpoint;
    Secret secret;
    uint64_t host;     // the same for two ranks that can share memory
    uint64_t network;  // the same for two ranks of one network namespace
    LocalName local;   // for ranks of the same host and network
};
static_assert(sizeof(RankAddress) <= 128 && std::is_trivially_copyable_v<RankAddress>);

// The sockets on which a rank listens during meet(). Its port is closed before and after, and always if no rank of
// another host dials.
class Listener {
  public:
    // `interfaces` as own_address takes it.
    explicit Listener(const char* interfaces);
    // On a free port of this address.
    explicit Listener(const Endpoint& own);
    const RankAddress& address() const { return address_; }
    const Socket& remote() const { return remote_; }
    const Socket& local() const { return local_; }

  private:
    RankAddress address_;
    Socket remote_;
    Socket local_;  // listens from the beginning, so a refused connection means that the rank is gone
};

// Whether two ranks' link is a Unix socket.
bool is_local(const RankAddress& a, const RankAddress& b);

// Equal for two ranks that can share memory: same kernel, PID namespace and shared memory. Different values of
// CROSSDOCK_HOST make processes of one host act as several hosts.
uint64_t host_identity();

// Throws ncclInvalidArgument if these are not the bytes of a RankAddress.
RankAddress read_address(const void* bytes);

struct Link {
    Socket socket;                // this rank's own link: closed
    std::vector<std::byte> blob;  // what the peer sent
};

inline constexpr size_t kMaxBlobBytes = size_t{64} << 10;

// Collective over the ranks with these addresses; returns one link per rank. Throws ncclRemoteError that names the
// ranks that did not connect within the timeout, and why; at once if a rank is known to have ended.
std::vector<Link> meet(const Listener& listener, std::span<const RankAddress> addresses, uint32_t rank,
                       std::span<const std::byte> blob, uint64_t timeout_ns);

// The protocol on a new link: the accepting rank sends a challenge, the dialling rank answers with a greeting that only
// ranks of the same communicator can make, and the accepting rank replies with its own greeting. A recorded greeting
// cannot be replayed.
struct Challenge {
    uint64_t magic;
    Secret nonce;  // fresh; no secret in itself
};
Challenge make_challenge();
bool is_challenge(const Challenge& challenge);

// answers: the receiver's nonce; nonce: what the reply to this greeting must answer.
std::vector<std::byte> make_greeting(std::span<const RankAddress> addresses, uint32_t source, uint32_t target,
                                     const Secret& answers, const Secret& nonce, std::span<const std::byte> blob);

// Length of a greeting, as far as its valid beginning tells.
size_t greeting_bytes(std::span<const std::byte> begun);

// Parses the first bytes of a greeting that `target` received. kMore: valid so far, but incomplete. Of an
// unauthenticated sender only the head is read; the blob has a proof of its own.
enum class Greeting : uint8_t { kMore, kGood, kBad };
struct Greeted {
    bool is_proven = false;  // the head is right
    uint32_t source = 0;     // valid if proven, as the nonce
    Secret nonce = {};
    std::span<const std::byte> blob;  // with kGood
};
Greeting read_greeting(std::span<const std::byte> bytes, std::span<const RankAddress> addresses, uint32_t target,
                       const Secret& asked, Greeted& greeted);

}  // namespace crossdock::network
