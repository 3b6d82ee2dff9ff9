// SPDX-License-Identifier: Apache-2.0
// How processes that know only a unique id find each other: the id names the process that has the control segment's
// file open.
#pragma once

#include <memory>

#include "fabric/cpu/mailbox.h"
#include "nccl.h"

namespace crossdock::cpu {

// Creates the control segment, which stays open until this process has joined or releases the id, or ends. Closes those
// of earlier ids whose ranks have all joined.
ncclUniqueId make_unique_id();

// Closes the control segment if this process has it open. Throws ncclInvalidArgument if make_unique_id() cannot have
// made the id.
void release_unique_id(const ncclUniqueId& id);

// Claims the rank for this process, and waits until live processes have claimed all ranks. Until then, another process
// may take the rank of one that ended or timed out. Throws as crossdockCommInitRank says.
std::shared_ptr<ControlSegment> join_control_segment(const ncclUniqueId& id, int num_ranks, int rank);

}  // namespace crossdock::cpu
