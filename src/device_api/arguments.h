// SPDX-License-Identifier: Apache-2.0
// Checks the arguments of NCCL's Device API in kernels. Each throws an Error, which ends the kernel; its message begins
// with the thread, the call (what) and its line.
#pragma once

#include <array>
#include <functional>

#include "device_api/device_comm.h"
#include "device_api/kernel_thread.h"

namespace crossdock::device_api {

Caller beginning(const KernelThread& thread, const char* what, crossdockWhere where);

// Finds the window, and makes the race detector watch all ranks' pieces of it.
WindowView find_window(KernelThread& thread, ncclWindow_t handle, size_t offset, size_t bytes, const char* what,
                       crossdockWhere where);

// The communicator's rank of a team's peer.
int world_rank(const KernelThread& thread, const DeviceComm& comm, crossdockTeam team, int peer, const char* what,
               crossdockWhere where);

DeviceComm& open_context(const KernelThread& thread, uint64_t id, int context, crossdockWhere where);

// Returns a function that tells whether the windows that are not null are still registered.
std::function<bool()> are_there(const DeviceComm& comm, const std::array<ncclWindow_t, 3>& windows);

}  // namespace crossdock::device_api
