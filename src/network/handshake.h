// SPDX-License-Identifier: Apache-2.0
// How ranks that know each other's addresses meet: a link between each two, over which they prove that they belong to
// the same communicator and exchange a few bytes. Links are TCP connections, within a host Unix sockets. Strangers may
// connect, send anything or nothing, and are turned away.
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

// What a rank hands to all others by a way of its own. Fits NCCL's handles of 128 bytes.
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

// What a rank listens on while it meets the others. Its port is closed before and after, and always where no rank of
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
    Socket local_;  // listens from the beginning, so who finds nobody there knows that the rank is gone
};

// Whether two ranks' link is a Unix socket.
bool is_local(const RankAddress& a, const RankAddress& b);

// The same for two ranks that can share memory: of one kernel, with the same processes and shared memory in sight. With
// different names in CROSSDOCK_HOST, processes of one host play several.
uint64_t host_identity();

// Error with ncclInvalidArgument where these are not the bytes of a RankAddress.
RankAddress read_address(const void* bytes);

struct Link {
    Socket socket;                // closed for the own rank
    std::vector<std::byte> blob;  // what the peer sent
};

inline constexpr size_t kMaxBlobBytes = size_t{64} << 10;

// Collective over all ranks whose addresses these are; gives a link for each. Error with ncclRemoteError that names the
// ranks that did not come within the time, and what was in the way; at once where a rank is known to have ended.
std::vector<Link> meet(const Listener& listener, std::span<const RankAddress> addresses, uint32_t rank,
                       std::span<const std::byte> blob, uint64_t timeout_ns);

// What follows is the conversation on a new link. Who accepted it sends a challenge, who dialled answers with a
// greeting that only the same communicator's ranks can make, and is answered by the other's greeting in the same way. A
// recorded greeting is worth nothing later.
struct Challenge {
    uint64_t magic;
    Secret nonce;  // fresh; no secret in itself
};
Challenge make_challenge();
bool is_challenge(const Challenge& challenge);

// `answers`: the nonce of whom it goes to; `nonce`: what the answer to this greeting has to answer.
std::vector<std::byte> make_greeting(std::span<const RankAddress> addresses, uint32_t source, uint32_t target,
                                     const Secret& answers, const Secret& nonce, std::span<const std::byte> blob);

// How long a greeting is, as far as its beginning says, in which nothing is wrong.
size_t greeting_bytes(std::span<const std::byte> begun);

// Looks at the first bytes of a greeting that came to `target`. kMore: some are missing, and so far none is wrong. No
// more than its head is wanted of who has not proved himself; the blob has a proof of its own.
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
