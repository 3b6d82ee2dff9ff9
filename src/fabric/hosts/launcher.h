// SPDX-License-Identifier: Apache-2.0
// Reads the environment variables that a launcher (torchrun, mpirun, srun) sets for its processes.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace crossdock::hosts {

struct Launch {
    int rank = 0;
    int num_ranks = 1;
    std::string address;             // of rank 0, "host:port"
    std::optional<int> local_ranks;  // number of ranks on this host, if known
    std::string launcher;            // its name, for messages
    std::string job;                 // the same for all ranks of a job, if known; else empty
};

// Returns null if the variable is not set.
using Variables = std::function<const char*(const char* name)>;

// The job as CROSSDOCK_JOB gives it; else empty.
std::string given_job(const Variables& variables);

// Throws ncclInvalidUsage that names the variable and its value if one is missing or contradicts another.
Launch read_launch(const Variables& variables);

}  // namespace crossdock::hosts
