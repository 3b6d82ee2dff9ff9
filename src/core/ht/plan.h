// SPDX-License-Identifier: Apache-2.0
// Divides a high-throughput operation into warps, stages and packets for the current device.
#pragma once

#include "core/group.h"
#include "kernels/ht/arguments.h"

namespace crossdock {

// Set the warp layout, packets and shared memory in the arguments and return the launch's shape. InvalidArgument if a
// block cannot hold even one stage.
LaunchShape plan_ht_update(const Group& group, const HtUpdateArgs& args);
// Elastic ones, too, whose scale_bytes or weight_bytes are set.
LaunchShape plan_ht_dispatch(const Group& group, HtDispatchArgs& args);
LaunchShape plan_ht_combine(const Group& group, HtCombineArgs& args);

}  // namespace crossdock
