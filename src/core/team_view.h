// SPDX-License-Identifier: Apache-2.0
// A rank's access to one symmetric allocation of its group: LSA peers by pointers, GIN peers through the network.
#pragma once

#include <vector>

#include "core/group_config.h"
#include "kernels/reach.h"

namespace crossdock {

struct TeamView {
    PeerMap peers;  // of LSA peers; loads and stores to others fault
    Reach reach;    // of GIN peers

    // words: of the allocation, used with several LSA teams.
    TeamView(Communicator& communicator, const GroupConfig& config, const SymmetricMemory& memory,
             const GinWords& words);
    TeamView(const TeamView&) = delete;
    TeamView& operator=(const TeamView&) = delete;

  private:
    std::vector<std::byte*> reachable_;  // the table of `peers`, if it has fewer ranks than the communicator's
};

}  // namespace crossdock
