// SPDX-License-Identifier: Apache-2.0
// How ranks that know nothing of each other but the address of rank 0 find each other: rank 0 listens there, the others
// come, and all receive everybody's card. Both sides prove that they know a common secret; who does not is turned away,
// and neither believed nor waited for. Of rank 0's address, listen_at() says on which interfaces it listens.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "network/handshake.h"

namespace crossdock::network {

// What a rank tells about itself.
struct RankCard {
    RankAddress address;
    char host_name[64];  // 0-terminated; for messages
    int64_t process;
    uint64_t process_start;  // in clock ticks from the host's start
};
static_assert(std::is_trivially_copyable_v<RankCard>);

struct Rendezvous {
    std::string address;  // of rank 0, "host:port"
    std::string secret;   // empty: any rank may come
    uint32_t rank;
    uint32_t num_ranks;
    uint64_t timeout_ns;
    std::string interfaces;  // as own_address takes them; empty: the one through which ranks reach rank 0
};

struct Attendance {
    Listener listener;  // of this rank's own card
    std::vector<RankCard> cards;
};

// Collective. Of `own` the address is filled in here, but for `address.host`. Error with ncclRemoteError that names who
// did not come within the time, and with ncclInvalidArgument where ranks contradict each other.
Attendance attend(const Rendezvous& rendezvous, const RankCard& own);

}  // namespace crossdock::network
