// SPDX-License-Identifier: Apache-2.0
#include "core/domain_view.h"

namespace crossdock {

DomainView::DomainView(Communicator& communicator, const GroupConfig& config, const SymmetricMemory& memory)
    : peers(memory.peers) {
    const int lsa_team_size = static_cast<int>(config.lsa_team_size);
    reach.num_ranks = communicator.num_ranks();
    reach.rank = communicator.rank();
    reach.first_of_domain = reach.rank / lsa_team_size * lsa_team_size;
    reach.end_of_domain = reach.first_of_domain + lsa_team_size;
    if (!config.has_several_domains()) return;
    reach.network = communicator.network_of(memory);
    // Also where ranks of one host only play nodes.
    if (peers.table == nullptr) return;
    for (int rank = 0; rank < reach.num_ranks; ++rank) {
        const bool is_inside = rank >= reach.first_of_domain && rank < reach.end_of_domain;
        reachable_.push_back(is_inside ? peers.table[rank] : unreachable_memory());
    }
    peers.table = reachable_.data();
}

}  // namespace crossdock
