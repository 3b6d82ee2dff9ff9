// SPDX-License-Identifier: Apache-2.0
// How ranks that know only the address of rank 0 find each other: rank 0 listens, the others connect, and each receives
// the RankInfo of all. Both sides prove that they know a common secret, and all but that is encrypted. A connection
// that cannot is closed, and what it sent is ignored. listen_at() says on which interfaces rank 0 listens.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "network/handshake.h"

namespace crossdock::network {

struct RankInfo {
    RankAddress address;
    char host_name[64];  // 0-terminated; for messages
    int64_t process;
    uint64_t process_start;  // in clock ticks from the host's start
};
static_assert(std::is_trivially_copyable_v<RankInfo>);

struct Rendezvous {
    std::string address;  // of rank 0, "host:port"
    std::string secret;   // empty: any process may join
    uint32_t rank;
    uint32_t num_ranks;
    uint64_t timeout_ns;
    std::string interfaces;  // as own_address takes them; empty: the one that connects ranks to rank 0
    std::string job = {};    // ranks of different jobs do not join each other; empty: unknown
};

struct JoinedRanks {
    Listener listener;  // this rank's
    std::vector<RankInfo> ranks;
};

// Collective. Fills in the address of `own` except `address.host`. Throws ncclRemoteError that names the ranks that did
// not join within the timeout, as far as this rank has met rank 0, ncclInvalidArgument if ranks contradict each other,
// and on rank 0 ncclSystemError that names the process that uses its port.
JoinedRanks join_ranks(const Rendezvous& rendezvous, const RankInfo& own);

}  // namespace crossdock::network
