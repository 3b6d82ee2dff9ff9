// SPDX-License-Identifier: Apache-2.0
// What a launcher (torchrun, mpirun, srun) tells its processes about themselves, in their environments.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace crossdock::hosts {

struct Launch {
    int rank = 0;
    int num_ranks = 1;
    std::string address;             // of rank 0, "host:port"
    std::optional<int> local_ranks;  // of this host, where it is known
    std::string launcher;            // whose variables these are, for messages
};

// Null: not set.
using Variables = std::function<const char*(const char* name)>;

// Error with ncclInvalidUsage that names the variable and its value where one is missing or contradicts another.
Launch read_launch(const Variables& variables);

}  // namespace crossdock::hosts
