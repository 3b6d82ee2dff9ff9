// SPDX-License-Identifier: Apache-2.0
//
// CUDA's driver, where the process has it: torch has loaded it before it has a tensor on a GPU.
#pragma once

#include <cstddef>

#include "crossdock.h"

namespace crossdock::python {

// Enqueues a copy between memory of the device that is current for this thread. False: it cannot be had here.
bool copy_on_device(void* target, const void* source, size_t num_bytes, cudaStream_t stream);

// Whether the driver's events can be had.
bool has_events();

// Events of the CUDA device of this number, which must be current for this thread; with the GIL held.

// An event of what the stream has by now, from a pool, where has_events. NULL: torch has to do it.
void* record_event(int device, cudaStream_t stream);
// To the pool. Streams that wait for it wait for what was recorded when they were told to.
void give_back_event(int device, void* event);
// Makes one stream wait for what the other one has by now. False: torch has to do it.
bool order_streams(int device, cudaStream_t waiting, cudaStream_t before);

// Makes the stream, of any device, wait for the event. False: this thread has no context of a device yet.
bool wait_for_event(cudaStream_t stream, void* event);

}  // namespace crossdock::python
