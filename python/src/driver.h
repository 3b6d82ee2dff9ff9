// SPDX-License-Identifier: Apache-2.0
//
// CUDA's driver, where the process has it: torch has loaded it before it has a tensor on a GPU.
#pragma once

#include "crossdock.h"

namespace crossdock::python {

// Whether the driver offers events.
bool has_events();

// Events of the CUDA device of this number, which must be current for this thread; with the GIL held.

// Records an event of the pool on the stream; needs has_events. NULL: use torch's.
void* record_event(int device, cudaStream_t stream);
// Back to the pool. Streams that wait for it are unaffected: they wait for what was recorded when they were ordered.
void give_back_event(int device, void* event);
// Makes `waiting` wait for the work that `before` has now. Returns false if it cannot: use torch.
bool order_streams(int device, cudaStream_t waiting, cudaStream_t before);

// Makes the stream, of any device, wait for the event. Returns false if this thread has no CUDA context yet.
bool wait_for_event(cudaStream_t stream, void* event);

}  // namespace crossdock::python
