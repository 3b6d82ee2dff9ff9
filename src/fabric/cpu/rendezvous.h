// SPDX-License-Identifier: Apache-2.0
// How processes that know only a unique id find each other: the id names the process that has the control segment's
// file open.
#pragma once

#include <memory>

#include "fabric/cpu/mailbox.h"
#include "nccl.h"

namespace crossdock::cpu {

// Creates the control segment, which stays open until this process has joined, or ends.
ncclUniqueId make_unique_id();

// Claims the rank for this process, and waits until live processes have claimed all ranks. Until then, another process
// may take the rank of one that ended or timed out. Throws as crossdockCommInitRank says.
std::shared_ptr<ControlSegment> join_control_segment(const ncclUniqueId& id, int num_ranks, int rank);

}  // namespace crossdock::cpu
