// SPDX-License-Identifier: Apache-2.0
// Maps ranks to hosts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace crossdock::hosts {

// Ranks [0, n), [n, 2n), ... share a host.
struct HostLayout {
    int num_ranks = 1;
    int ranks_per_host = 1;
    int first_local = 0;  // this host's first rank
    bool is_local(int rank) const { return rank >= first_local && rank < first_local + ranks_per_host; }
    size_t first_local_index() const { return static_cast<size_t>(first_local); }
};

// hosts: a number per rank, equal for ranks of one host. Throws ncclInvalidUsage if ranks of a host are not
// consecutive, or hosts have different numbers of ranks.
HostLayout lay_out(std::span<const uint64_t> hosts, std::span<const std::string> names, int rank);

}  // namespace crossdock::hosts
