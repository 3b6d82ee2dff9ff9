// SPDX-License-Identifier: Apache-2.0
#include "fabric/hosts/layout.h"

#include <vector>

#include "core/error.h"

namespace crossdock::hosts {
namespace {

struct Run {
    size_t first;
    size_t num_ranks;
};

}  // namespace

HostLayout lay_out(std::span<const uint64_t> hosts, std::span<const std::string> names, int rank) {
    std::vector<Run> runs;
    for (size_t each = 0; each < hosts.size(); ++each) {
        if (each > 0 && hosts[each] == hosts[each - 1]) {
            ++runs.back().num_ranks;
            continue;
        }
        for (const Run& earlier : runs) {
            require(hosts[earlier.first] != hosts[each], ncclInvalidUsage,
                    "ranks {} and {} run on host {}, but ranks between them on others: number the ranks host by host "
                    "(mpirun --map-by slot, srun --distribution=block)",
                    earlier.first, each, names[each]);
        }
        runs.push_back({each, 1});
    }
    for (const Run& run : runs) {
        require(run.num_ranks == runs.front().num_ranks, ncclInvalidUsage,
                "host {} has {} ranks, host {} has {}: start the same number on all hosts", names[runs.front().first],
                runs.front().num_ranks, names[run.first], run.num_ranks);
    }
    HostLayout layout;
    layout.num_ranks = static_cast<int>(hosts.size());
    layout.ranks_per_host = static_cast<int>(runs.front().num_ranks);
    layout.first_local = rank / layout.ranks_per_host * layout.ranks_per_host;
    return layout;
}

}  // namespace crossdock::hosts
