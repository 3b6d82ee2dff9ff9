// SPDX-License-Identifier: Apache-2.0
// High throughput in several LSA teams: agents, and what crosses between teams.
//
// A row is sent once to each other team that has one of the token's experts: to the rail peer, the rank with the same
// place in its team, which forwards the row to the ranks of the experts. In a combine the same rank sums the rows of
// its team, and one row (or packet of rows) returns to the source rank. So inside a team the rail peer is the *agent*
// of a source rank of another team; a source rank in this team is its own agent. A *route* numbers the pairs (source,
// LSA peer) of an agent, its own pairs like the ranks.
#pragma once

#include "kernels/ht/waits.h"

namespace crossdock {
namespace {

// ---- agents ----

// The ranks of this team: [first, end).
CROSSDOCK_DEVICE uint32_t first_of_team(const HtCommon& c) {
    if constexpr (!kHasGinPeers) return 0;
    return c.reach.first_of_team;
}
CROSSDOCK_DEVICE uint32_t end_of_team(const HtCommon& c) {
    if constexpr (!kHasGinPeers) return c.arena.num_ranks;
    return c.reach.end_of_team;
}
CROSSDOCK_DEVICE uint32_t team_size(const HtCommon& c) { return end_of_team(c) - first_of_team(c); }
CROSSDOCK_DEVICE uint32_t num_teams(const HtCommon& c) {
    if constexpr (!kHasGinPeers) return 1;
    return c.arena.num_ranks / team_size(c);
}
CROSSDOCK_DEVICE uint32_t own_team(const HtCommon& c) { return first_of_team(c) / team_size(c); }

CROSSDOCK_DEVICE uint32_t agent_of(const HtCommon& c, uint32_t source) {
    if constexpr (!kHasGinPeers) return source;
    return first_of_team(c) + source % team_size(c);
}
CROSSDOCK_DEVICE uint32_t route_of(const HtCommon& c, uint32_t source, uint32_t lsa_peer) {
    if constexpr (!kHasGinPeers) return lsa_peer;
    return source / team_size(c) * team_size(c) + lsa_peer - first_of_team(c);
}
// The source rank in a team for which this rank is the agent.
CROSSDOCK_DEVICE uint32_t rail_peer(const HtCommon& c, uint32_t team) {
    return team * team_size(c) + c.rank - first_of_team(c);
}

// Data that this rank puts, or that was put to it, at an offset of its own arena.
template <typename T>
CROSSDOCK_DEVICE T* in_own_arena(const HtCommon& c, uint64_t offset) {
    return reinterpret_cast<T*>(c.reach.network.local + offset);
}

// ---- what crosses ----

enum class Crossing : uint32_t {
    kOut,  // own tokens, to another team
    kIn    // tokens of another team's rail peer, to this team
};

CROSSDOCK_DEVICE uint32_t* crossing_masks(const HtCommon& c, Crossing direction, uint32_t team) {
    return c.tables.crossing_masks + (static_cast<uint32_t>(direction) * num_teams(c) + team) * c.tables.chunks;
}
CROSSDOCK_DEVICE uint32_t* crossing_firsts(const HtCommon& c, Crossing direction, uint32_t team) {
    return c.tables.crossing_firsts + (static_cast<uint32_t>(direction) * num_teams(c) + team) * (c.tables.chunks + 1);
}

}  // namespace
}  // namespace crossdock
