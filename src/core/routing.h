// SPDX-License-Identifier: Apache-2.0
// Routing counts (contract: api/routing.h): checks the arguments and launches.
#pragma once

#include "kernels/routing/arguments.h"

namespace crossdock {

void count_routing(const crossdockRoutingCounts_t* caller, cudaStream_t stream);

}  // namespace crossdock
