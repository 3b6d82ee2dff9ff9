// SPDX-License-Identifier: Apache-2.0
// For sources that replace the instances of .cu files in builds without CUDA.
#pragma once

#include "core/error.h"
#include "runtime/launch.h"

namespace crossdock {

// Never called: only a GPU's communicator has a runtime without an executor.
template <typename Kernel, Peers kReached>
void OnGpu<Kernel, kReached>::launch(const typename Kernel::Args&, const LaunchShape&, cudaStream_t) {
    fail(ncclInternalError, "{}: this library was built without CUDA", Kernel::kName);
}

}  // namespace crossdock
