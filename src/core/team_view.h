// SPDX-License-Identifier: Apache-2.0
// How a rank sees one symmetric allocation of its group: the ranks of its LSA team by pointers, the others
// through the network.
#pragma once

#include <vector>

#include "core/group_config.h"
#include "kernels/reach.h"

namespace crossdock {

struct TeamView {
    PeerMap peers;  // of the team; loads and stores outside of it fault
    Reach reach;    // of the others; where its words are in the allocation, the owner of that says

    TeamView(Communicator& communicator, const GroupConfig& config, const SymmetricMemory& memory);
    TeamView(const TeamView&) = delete;
    TeamView& operator=(const TeamView&) = delete;

  private:
    std::vector<std::byte*> reachable_;  // what peers refers to, where it is less than the communicator's
};

}  // namespace crossdock
