// SPDX-License-Identifier: Apache-2.0
// Routing that a handle finds in its caller's memory, where anything may have been written since: kernels index and
// count by its tables without looking at them again.
#pragma once

#include <cstddef>

#include "kernels/ht/geometry.h"

namespace crossdock {

// memory: a copy on the host of a handle's memory, whose HtRouting has numbers that fit the geometry. Throws
// ncclInvalidUsage that names the table which no update of such a handle can have written.
void expect_sound_tables(std::byte* memory, const HtHandleGeometry& geometry, int rank, bool expert_major);

}  // namespace crossdock
