// SPDX-License-Identifier: Apache-2.0
// Communicators whose ranks are processes of one or several hosts. Ranks of a host share memory and are an LSA team;
// others are reached through the network.
#pragma once

#include <memory>
#include <string>

#include "fabric/cpu/cpu_communicator.h"
#include "fabric/hosts/launcher.h"

namespace crossdock::hosts {

// Collective, bounded by cpu::join_timeout_ns(). Throws as crossdockCommInitHosts says.
std::shared_ptr<cpu::CpuCommunicator> join_hosts(const Launch& launch);

}  // namespace crossdock::hosts
