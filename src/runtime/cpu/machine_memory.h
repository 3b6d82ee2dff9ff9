// SPDX-License-Identifier: Apache-2.0
// The total memory, for checks of allocations that cannot succeed.
#pragma once

#include <cstdint>
#include <string>

#include "device/platform.h"

namespace crossdock::cpu {

// Bytes of this machine's memory, or the limit of this process's control group (a container's or job's) if that is
// less. Read once.
uint64_t machine_memory();

// The limit of the control group whose file system (versions 1 and 2) is mounted at `root`; `own` is the text of
// /proc/self/cgroup. UINT64_MAX: none.
uint64_t control_group_limit(const std::string& root, const std::string& own);

}  // namespace crossdock::cpu
