// SPDX-License-Identifier: Apache-2.0
#include "runtime/cuda/kernel_list.h"

#include <algorithm>

#include "core/error.h"
#include "runtime/cuda/cuda_check.h"
#include "runtime/gpu_support.h"

namespace crossdock {
namespace {

bool lacks_code(cudaError_t result) {
    return result == cudaErrorNoKernelImageForDevice || result == cudaErrorInvalidDeviceFunction ||
           result == cudaErrorUnsupportedPtxVersion || result == cudaErrorJitCompilerNotFound;
}

Gpu gpu(int device) {
    cudaDeviceProp properties = {};
    check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    return {device, &properties.name[0], 10 * properties.major + properties.minor};
}

std::vector<ListedKernel*>& list() {
    static auto& kernels = *new std::vector<ListedKernel*>;
    return kernels;
}

}  // namespace

ListedKernel::ListedKernel(const void* function) noexcept : function_(function) { list().push_back(this); }

cudaError_t ListedKernel::prepare(cudaFuncAttributes& attributes) const noexcept {
    int device = 0;
    int bytes = 0;
    cudaError_t result = cudaGetDevice(&device);
    if (result == cudaSuccess) result = cudaFuncGetAttributes(&attributes, function_);  // loads the kernel
    if (result == cudaSuccess) result = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (result == cudaSuccess)
        result = cudaFuncSetAttribute(function_, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      bytes - static_cast<int>(attributes.sharedSizeBytes));
    return result;
}

const std::vector<ListedKernel*>& listed_kernels() { return list(); }

LoadedKernels load_kernels(int device) {
    DeviceGuard guard(device);
    LoadedKernels loaded;
    // Called every time: it is cheap if the kernels are loaded, and a device that was reset has unloaded them.
    for (const ListedKernel* kernel : list()) {
        cudaFuncAttributes attributes{};
        const cudaError_t result = kernel->prepare(attributes);
        if (lacks_code(result)) {
            (void)cudaGetLastError();
            fail_without_code(gpu(device), CROSSDOCK_BUILT_ARCHITECTURES, cudaGetErrorString(result));
        }
        check_cuda(result, "loading a kernel (cudaFuncGetAttributes)");
        // Of the code's own architecture: the driver compiles code for older ones for newer GPUs.
        loaded.wait_for_previous &= 10 * attributes.ptxVersion >= kFirstWithBulkCopies;
        loaded.static_shared_bytes = std::max(loaded.static_shared_bytes, attributes.sharedSizeBytes);
    }
    return loaded;
}

void fail_launch(const char* kernel, const LaunchShape& shape, cudaError_t reason) {
    fail(ncclUnhandledCudaError, "launching {} ({} blocks of {} warps, {} bytes of shared memory per block): {}",
         kernel, shape.num_blocks, shape.warps_per_block, shape.shared_bytes, cudaGetErrorString(reason));
}

}  // namespace crossdock
