// SPDX-License-Identifier: Apache-2.0
// CUDA's results as exceptions, and guards of the current device.
#pragma once

#include <cuda_runtime.h>

namespace crossdock {

// Throws ncclUnhandledCudaError with a message that names the call and contains CUDA's message.
[[noreturn]] void fail_cuda(cudaError_t result, const char* call);
inline void check_cuda(cudaError_t result, const char* call) {
    if (result != cudaSuccess) fail_cuda(result, call);
}

// While it lives, the thread may allocate, free and query events although another thread captures a graph, a capture
// that CUDA would otherwise invalidate.
class RelaxedCapture {
  public:
    RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
    RelaxedCapture(const RelaxedCapture&) = delete;
    RelaxedCapture& operator=(const RelaxedCapture&) = delete;

  private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Makes a device current for a scope, with RelaxedCapture.
class DeviceGuard {
  public:
    explicit DeviceGuard(int device) {
        check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
        changed_ = previous_ != device;
        if (changed_) check_cuda(cudaSetDevice(device), "cudaSetDevice");
    }
    ~DeviceGuard() {
        if (changed_) (void)cudaSetDevice(previous_);
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    RelaxedCapture relaxed_;
    int previous_ = 0;
    bool changed_ = false;
};

}  // namespace crossdock
