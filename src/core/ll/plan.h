// SPDX-License-Identifier: Apache-2.0
// How a low-latency operation is cut into blocks, warps and chunks of rows, on the device at hand.
#pragma once

#include "core/group.h"
#include "kernels/ll/arguments.h"

namespace crossdock {

// Set the arguments that say who does what (blocks, warps, stages, chunks, forms of rows) and where it lies in shared
// memory, and return the shape. InvalidArgument where not even one warp's stage fits into a block.
LaunchShape plan_ll_dispatch(const Group& group, LlDispatchArgs& args);
LaunchShape plan_ll_combine(const Group& group, LlCombineArgs& args);

}  // namespace crossdock
