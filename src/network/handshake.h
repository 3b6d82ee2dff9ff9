// SPDX-License-Identifier: Apache-2.0
// How ranks that know each other's addresses meet: a TCP link between each two, over which they prove that they belong
// to the same communicator and exchange a few bytes. Strangers may connect, send anything or nothing, and are turned
// away.
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
    uint64_t host;  // the same for two ranks that can share memory
};
static_assert(sizeof(RankAddress) <= 128 && std::is_trivially_copyable_v<RankAddress>);

class Listener {
  public:
    // `interfaces` as own_address takes it.
    explicit Listener(const char* interfaces);
    // On a free port of this address.
    explicit Listener(const Endpoint& own);
    const RankAddress& address() const { return address_; }
    const Socket& socket() const { return socket_; }

  private:
    RankAddress address_;
    Socket socket_;
};

// The same for two ranks that can share memory: of one kernel, with the same processes and shared memory in sight.
uint64_t host_identity();

// Error with ncclInvalidArgument where these are not the bytes of a RankAddress.
RankAddress read_address(const void* bytes);

struct Link {
    Socket socket;                // closed for the own rank
    std::vector<std::byte> blob;  // what the peer sent
};

inline constexpr size_t kMaxBlobBytes = size_t{64} << 10;

// Collective over all ranks whose addresses these are; gives a link for each. Error with ncclRemoteError that names the
// ranks that did not come within the time.
std::vector<Link> meet(const Listener& listener, std::span<const RankAddress> addresses, uint32_t rank,
                       std::span<const std::byte> blob, uint64_t timeout_ns);

// The greeting by which a rank introduces itself on a new link; for tests that play a bad one.
std::vector<std::byte> make_greeting(std::span<const RankAddress> addresses, uint32_t source, uint32_t target,
                                     std::span<const std::byte> blob);

// How long a greeting is, as far as its beginning says, in which nothing is wrong.
size_t greeting_bytes(std::span<const std::byte> begun);
// Looks at the first bytes of a greeting that came to `target`. kMore: some are missing, and so far none is wrong.
enum class Greeting : uint8_t { kMore, kGood, kBad };
Greeting read_greeting(std::span<const std::byte> bytes, std::span<const RankAddress> addresses, uint32_t target,
                       uint32_t& source, std::span<const std::byte>& blob);

}  // namespace crossdock::network
