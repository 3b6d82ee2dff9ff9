// SPDX-License-Identifier: Apache-2.0
// Communicators whose ranks are processes of one host. All shared memory lives in memory files without a name, which
// peers open through the owner's /proc entry; the kernel frees it with the last process, however that ends.
#pragma once

#include "fabric/cpu/cpu_communicator.h"

namespace crossdock::cpu {

// Collective, bounded by join_timeout_ns(); errors as crossdockCommInitRank says.
std::shared_ptr<CpuCommunicator> join_processes(const ncclUniqueId& id, int num_ranks, int rank);

}  // namespace crossdock::cpu
