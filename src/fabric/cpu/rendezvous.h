// SPDX-License-Identifier: Apache-2.0
// How processes that share nothing but an id find each other: the id says in which process the control segment's memory
// file is open.
#pragma once

#include <memory>

#include "fabric/cpu/mailbox.h"
#include "nccl.h"

namespace crossdock::cpu {

// Makes the control segment. It stays open in this process until this process has joined, or ends.
ncclUniqueId make_unique_id();

// Takes the rank's seat and returns when all seats are taken by processes that live; Error as crossdockCommInitRank
// says. Until then a process that ended, or gave up, may be succeeded by another of its rank.
std::shared_ptr<ControlSegment> join_control_segment(const ncclUniqueId& id, int num_ranks, int rank);

}  // namespace crossdock::cpu
