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

constexpr int kKnownDevices = 64;  // bits of prepared_

}  // namespace

ListedKernel::ListedKernel(const void* function) noexcept : function_(function) { list().push_back(this); }

cudaError_t ListedKernel::prepare() noexcept {
    int device = 0;
    int bytes = 0;
    cudaFuncAttributes attributes{};
    cudaError_t result = cudaGetDevice(&device);
    if (result == cudaSuccess) result = cudaFuncGetAttributes(&attributes, function_);  // loads the kernel
    if (result == cudaSuccess) result = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (result == cudaSuccess)
        result = cudaFuncSetAttribute(function_, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (result == cudaSuccess && device < kKnownDevices)
        prepared_.fetch_or(uint64_t{1} << device, std::memory_order_release);
    return result;
}

cudaError_t ListedKernel::ensure_prepared() noexcept {
    int device = 0;
    const cudaError_t known = cudaGetDevice(&device);
    if (known != cudaSuccess) return known;
    const bool is_prepared = device < kKnownDevices && (prepared_.load(std::memory_order_acquire) >> device & 1) != 0;
    return is_prepared ? cudaSuccess : prepare();
}

const std::vector<ListedKernel*>& listed_kernels() { return list(); }

void load_kernels(int device) {
    DeviceGuard guard(device);
    // Called every time: it is cheap if the kernels are loaded, and a device that was reset has unloaded them.
    for (ListedKernel* kernel : list()) check_cuda(kernel->prepare(), "loading a kernel (cudaFuncGetAttributes)");
}

void fail_launch(const char* kernel, const LaunchShape& shape, cudaError_t reason) {
    fail(ncclUnhandledCudaError, "launching {} ({} blocks of {} warps, {} bytes of shared memory per block): {}",
         kernel, shape.num_blocks, shape.warps_per_block, shape.shared_bytes, cudaGetErrorString(reason));
}

}  // namespace crossdock
