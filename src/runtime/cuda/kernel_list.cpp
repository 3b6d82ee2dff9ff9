// SPDX-License-Identifier: Apache-2.0
#include "runtime/cuda/kernel_list.h"

#include "core/error.h"
#include "runtime/cuda/cuda_check.h"

namespace crossdock {
namespace {

std::vector<ListedKernel*>& list() {
    static auto& kernels = *new std::vector<ListedKernel*>;
    return kernels;
}

}  // namespace

ListedKernel::ListedKernel(const void* function) noexcept : function_(function) { list().push_back(this); }

cudaError_t ListedKernel::prepare() const noexcept {
    int device = 0;
    int bytes = 0;
    cudaFuncAttributes attributes{};
    cudaError_t result = cudaGetDevice(&device);
    if (result == cudaSuccess) result = cudaFuncGetAttributes(&attributes, function_);  // loads the kernel
    if (result == cudaSuccess) result = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (result == cudaSuccess)
        result = cudaFuncSetAttribute(function_, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    return result;
}

const std::vector<ListedKernel*>& listed_kernels() { return list(); }

void load_kernels(int device) {
    DeviceGuard guard(device);
    // Called every time: it is cheap if the kernels are loaded, and a device that was reset has unloaded them.
    for (const ListedKernel* kernel : list()) check_cuda(kernel->prepare(), "loading a kernel (cudaFuncGetAttributes)");
}

void fail_launch(const char* kernel, const LaunchShape& shape, cudaError_t reason) {
    fail(ncclUnhandledCudaError, "launching {} ({} blocks of {} warps, {} bytes of shared memory per block): {}",
         kernel, shape.num_blocks, shape.warps_per_block, shape.shared_bytes, cudaGetErrorString(reason));
}

}  // namespace crossdock
