// SPDX-License-Identifier: Apache-2.0
// Functions of the driver that have no counterpart in the runtime.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace crossdock {

// version: the first driver that has what is asked for. Null: this one is older.
template <typename Function>
Function* driver_function(const char* name, unsigned version) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t result = cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &status);
    const bool has_it = result == cudaSuccess && status == cudaDriverEntryPointSuccess;
    return has_it ? reinterpret_cast<Function*>(function) : nullptr;
}

}  // namespace crossdock
