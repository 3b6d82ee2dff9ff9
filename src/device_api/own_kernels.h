// SPDX-License-Identifier: Apache-2.0
// ncclGin in Crossdock's own kernels (device/network.h). Their threads are warps of the executor, not KernelThreads.
// Their device communicator (device/cpu/device_comm.h) has one context and nothing else, and their windows are
// SymmetricMemory. They use puts, strong VA signals that add, and flushes only; arguments are not checked.
#pragma once

#include "crossdock/device/entry.hpp"
#include "device/cpu/warp.h"

namespace crossdock::device_api {

// The running warp of an own kernel; null in users' kernels and outside of kernels.
cpu::Warp* own_kernels_warp();

void post(cpu::Warp& warp, const crossdockPut& put);

}  // namespace crossdock::device_api
