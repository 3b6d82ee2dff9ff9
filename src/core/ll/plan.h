// SPDX-License-Identifier: Apache-2.0
// How a low-latency operation is cut into blocks, warps and chunks of rows, on the device at hand.
#pragma once

#include "core/group.h"
#include "kernels/ll/arguments.h"

namespace crossdock {

// Set chunk and warps in the arguments and return the shape. InvalidArgument where not even one warp's stage fits into
// a block.
LaunchShape plan_ll_dispatch(const Group& group, LlDispatchArgs& args);
LaunchShape plan_ll_combine(const Group& group, LlCombineArgs& args);

}  // namespace crossdock
