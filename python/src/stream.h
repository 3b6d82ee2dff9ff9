// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include "crossdock.h"

namespace crossdock::python {

// The stream that a caller means. None: on CPUs none; on GPUs torch's current one of the device (-1: of the current
// device) where torch is there, else the legacy default stream. Otherwise an address, or an object of torch, CuPy, or
// cuda.core, or with __cuda_stream__. InvalidArgument: none of these.
cudaStream_t stream_from(nanobind::handle stream, bool is_cpu, int device);

// torch's current stream of a CUDA device (-1: of the current one); the legacy default stream where torch is not there.
cudaStream_t current_stream_of_torch(int device);

// Whether torch's current stream is being captured. CUDA must be initialised.
bool is_capturing();

void bind_streams(nanobind::module_& module);

}  // namespace crossdock::python
