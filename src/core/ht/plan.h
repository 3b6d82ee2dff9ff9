// SPDX-License-Identifier: Apache-2.0
// How a high-throughput operation is cut into warps, stages and packets, on the device at hand.
#pragma once

#include "core/group.h"
#include "kernels/ht/arguments.h"

namespace crossdock {

// Set the warp layout, packets and shared memory in the arguments and return the shape. InvalidArgument where not even
// one stage fits into a block.
LaunchShape plan_ht_update(const Group& group, const HtUpdateArgs& args);
LaunchShape plan_ht_dispatch(const Group& group, HtDispatchArgs& args);
LaunchShape plan_ht_combine(const Group& group, HtCombineArgs& args);

}  // namespace crossdock
