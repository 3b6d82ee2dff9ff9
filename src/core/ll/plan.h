// SPDX-License-Identifier: Apache-2.0
// Divides a low-latency operation into blocks, warps and chunks of rows for the current device.
#pragma once

#include "core/group.h"
#include "kernels/ll/arguments.h"

namespace crossdock {

// Set the arguments for blocks, warps, stages, chunks, row forms and the layout of shared memory, and return the
// launch's shape. num_sms: of crossdockHandleSetSms. InvalidArgument if a block cannot hold even one warp's stage.
LaunchShape plan_ll_dispatch(const Group& group, LlDispatchArgs& args, uint32_t num_sms = 0);
LaunchShape plan_ll_combine(const Group& group, LlCombineArgs& args, uint32_t num_sms = 0);

}  // namespace crossdock
