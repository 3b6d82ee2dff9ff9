// SPDX-License-Identifier: Apache-2.0
#include "kernels/launch.h"

#include "core/error.h"

namespace crossdock {

void fail_launch(const char* kernel, const LaunchShape& shape, const char* reason) {
    fail(ncclUnhandledCudaError, "launching {} ({} blocks of {} warps, {} bytes of shared memory a block): {}", kernel,
         shape.num_blocks, shape.warps_per_block, shape.shared_bytes, reason);
}

}  // namespace crossdock
