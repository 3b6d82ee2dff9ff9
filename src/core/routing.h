// SPDX-License-Identifier: Apache-2.0
// Routing counts and packed routing (contract: crossdock.h): checks the arguments and launches.
#pragma once

#include "crossdock.h"

namespace crossdock {

void count_routing(const crossdockRoutingCounts_t* caller, cudaStream_t stream);
void pack_routing(const crossdockRoutingSent_t* caller, cudaStream_t stream);
void unpack_routing(const crossdockRoutingReceived_t* caller, cudaStream_t stream);

}  // namespace crossdock
