// SPDX-License-Identifier: Apache-2.0
// ncclGin in Crossdock's own kernels (device/network.h). Each of their threads is a warp of the executor, where a
// program's kernel has a fiber with a KernelThread. Their device communicator (device/cpu/device_comm.h) has one
// context and nothing else, and what they take for a window is a SymmetricMemory. Puts, strong VA signals that add, and
// flushes are all that they use; their arguments are not checked.
#pragma once

#include "crossdock/device/entry.hpp"
#include "device/cpu/warp.h"

namespace crossdock::gin {

// Whose code runs; null: a program's kernel's, or no kernel's.
cpu::Warp* own_kernels_warp();

void post(cpu::Warp& warp, const crossdockPut& put);

}  // namespace crossdock::gin
