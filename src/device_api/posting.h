// SPDX-License-Identifier: Apache-2.0
// How kernels post operations to the proxy or the network, and wait for them.
#pragma once

#include "device_api/device_comm.h"
#include "device_api/kernel_thread.h"

namespace crossdock::device_api {

// True if the peer is on another host, so that its memory is not mapped here.
bool is_remote(const DeviceComm& comm, int peer);

// Waits while the proxy's queue is full.
void post(KernelThread& thread, const DeviceComm& comm, int context, int peer, const Descriptor& descriptor,
          const Caller& caller);

// Waits until the first `number` operations of the context to the peer are complete: puts have read their sources, gets
// have landed.
void wait_until_read(KernelThread& thread, const DeviceComm& comm, int context, int peer, uint64_t number,
                     crossdockWhere where);

}  // namespace crossdock::device_api
