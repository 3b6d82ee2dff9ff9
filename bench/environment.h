// SPDX-License-Identifier: Apache-2.0
// Ranks that a launcher has started: mpirun, srun or torchrun.
#pragma once

#include <optional>
#include <string>

#include "crossdock.h"

namespace crossdock::bench {

struct LaunchedRank {
    int rank = 0;
    int num_ranks = 1;
    int local_rank = 0;          // among the ranks of this host
    bool is_on_one_host = true;  // all ranks run on this host, as far as the launcher says
    std::string launcher;
};

// From the launcher's variables: CROSSDOCK_*, OMPI_COMM_WORLD_*, PMI_*, SLURM_* of a job step, RANK and WORLD_SIZE.
std::optional<LaunchedRank> launched_rank();

// A CPU communicator of all launched ranks. Those of several hosts meet as crossdockCommInitFromEnvironment says, those
// of one host at `path`; empty: a file that is named after the process that started them all. Throws with a message
// after a minute.
ncclComm_t meet(const LaunchedRank& launched, std::string path);

}  // namespace crossdock::bench
