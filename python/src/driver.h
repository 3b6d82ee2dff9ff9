// SPDX-License-Identifier: Apache-2.0
//
// CUDA's driver, where the process has it: torch has loaded it before it has a tensor on a GPU.
#pragma once

#include <cstddef>

#include "crossdock.h"

namespace crossdock::python {

// Enqueues a copy between memory of the device that is current for this thread. False: it cannot be had here.
bool copy_on_device(void* target, const void* source, size_t num_bytes, cudaStream_t stream);

// Makes one stream wait for what the other one has by now, on the CUDA device of this number, which must be current for
// this thread, with the GIL held. False: torch has to do it.
bool order_streams(int device, cudaStream_t waiting, cudaStream_t before);

}  // namespace crossdock::python
