// SPDX-License-Identifier: Apache-2.0
// What kernels hand to the proxy or to the network, and how they wait for it.
#pragma once

#include "gin/device_comm.h"
#include "gin/kernel_thread.h"

namespace crossdock::gin {

// The peer's memory is not mapped here.
bool is_remote(const DeviceComm& comm, int peer);

// Waits while the proxy's queue is full.
void post(KernelThread& thread, const DeviceComm& comm, int context, int peer, const Descriptor& descriptor,
          const Caller& caller);

// Until the sources of the first `number` that were posted in the context to the peer have been read, and gets among
// them are there.
void wait_until_read(KernelThread& thread, const DeviceComm& comm, int context, int peer, uint64_t number,
                     crossdockWhere where);

}  // namespace crossdock::gin
