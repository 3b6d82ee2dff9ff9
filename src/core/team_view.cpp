// SPDX-License-Identifier: Apache-2.0
#include "core/team_view.h"

namespace crossdock {

TeamView::TeamView(Communicator& communicator, const GroupConfig& config, const SymmetricMemory& memory,
                   const GinWords& words)
    : peers(memory.peers) {
    reach.num_ranks = static_cast<uint32_t>(communicator.num_ranks());
    reach.rank = static_cast<uint32_t>(communicator.rank());
    reach.first_of_team = reach.rank / config.lsa_team_size * config.lsa_team_size;
    reach.end_of_team = reach.first_of_team + config.lsa_team_size;
    if (!config.has_several_teams()) return;
    reach.words = words;
    reach.network = communicator.network_of(memory);
    communicator.note_signal_words(memory, words.signals.offset, uint64_t{kNumSignals} * reach.num_ranks);
    // Also if teams are only simulated on one host.
    if (peers.table == nullptr) return;
    for (uint32_t rank = 0; rank < reach.num_ranks; ++rank) {
        const bool is_inside = rank >= reach.first_of_team && rank < reach.end_of_team;
        reachable_.push_back(is_inside ? peers.table[rank] : unreachable_memory());
    }
    peers.table = reachable_.data();
}

}  // namespace crossdock
