// SPDX-License-Identifier: Apache-2.0
// Routing counts, packed routing, and rows by expert (contract: crossdock.h): checks the arguments and launches.
#pragma once

#include "crossdock.h"

namespace crossdock {

void count_routing(const crossdockRoutingCounts_t* caller, cudaStream_t stream);
void pack_routing(const crossdockRoutingSent_t* caller, cudaStream_t stream);
void unpack_routing(const crossdockRoutingReceived_t* caller, cudaStream_t stream);
void place_rows(const crossdockRowPlaces_t* caller, cudaStream_t stream);
void expand_rows(const crossdockExpandedRows_t* caller, cudaStream_t stream);
void reduce_rows(const crossdockReducedRows_t* caller, cudaStream_t stream);

}  // namespace crossdock
