// SPDX-License-Identifier: Apache-2.0
// How ranks that share a control segment join: each claims its rank for its process, and waits until live processes
// have claimed all. Processes of the system, or those that the simulation plays.
#pragma once

#include <cstdint>

#include "fabric/cpu/mailbox.h"
#include "runtime/cpu/executor.h"

namespace crossdock::cpu {

// The processes that join, as numbers that are not 0.
class JoiningProcesses {
  public:
    virtual ~JoiningProcesses() = default;
    virtual uint64_t own() = 0;
    virtual bool has_ended(uint64_t process) = 0;
    // For messages.
    virtual int64_t name(uint64_t process) = 0;
};

// Claims the rank for this process, and waits until live processes have claimed all ranks. Until then, another process
// may take the rank of one that ended or timed out. Throws as crossdockCommInitRank says.
void join(ControlSegment& control, int num_ranks, int rank, JoiningProcesses& processes, Executor& executor,
          uint64_t timeout_ns);

}  // namespace crossdock::cpu
