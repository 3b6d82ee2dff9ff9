// SPDX-License-Identifier: Apache-2.0
#include "runtime/cuda/stream_order.h"

#include "runtime/cuda/cuda_check.h"

namespace crossdock {
CudaStreamOrder::CudaStreamOrder(int device) : device_(device) {
    DeviceGuard guard(device_);
    check_cuda(cudaEventCreateWithFlags(&last_eager_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    const cudaError_t result = cudaEventCreateWithFlags(&last_captured_, cudaEventDisableTiming);
    if (result != cudaSuccess) (void)cudaEventDestroy(last_eager_);
    check_cuda(result, "cudaEventCreateWithFlags");
}

CudaStreamOrder::~CudaStreamOrder() {
    (void)cudaEventDestroy(last_eager_);
    (void)cudaEventDestroy(last_captured_);
}

// Keeps host overhead low: queries CUDA once per fact, and relies on the caller for the current device.
bool CudaStreamOrder::before_operation(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    now_ = {};
    check_cuda(cudaStreamGetCaptureInfo(stream, &status, &now_.capture), "cudaStreamGetCaptureInfo");
    if (status == cudaStreamCaptureStatusActive) {
        if (now_.capture == capture_) check_cuda(cudaStreamWaitEvent(stream, last_captured_), "cudaStreamWaitEvent");
        return true;
    }
    now_.capture = 0;
    check_cuda(cudaStreamGetId(stream, &now_.stream), "cudaStreamGetId");
    if (eager_stream_ != 0 && eager_stream_ != now_.stream) {
        check_cuda(record_late(), "cudaEventRecord");
        check_cuda(cudaStreamWaitEvent(stream, last_eager_), "cudaStreamWaitEvent");
    }
    return false;
}

void CudaStreamOrder::after_operation(cudaStream_t stream, bool rest_follows) {
    if (now_.capture != 0) {
        check_cuda(cudaEventRecord(last_captured_, stream), "cudaEventRecord");
        capture_ = now_.capture;
        return;
    }
    const bool is_default = stream == nullptr || stream == cudaStreamLegacy;
    is_late_ = rest_follows && is_default;
    if (!is_late_) check_cuda(cudaEventRecord(last_eager_, stream), "cudaEventRecord");
    eager_stream_ = now_.stream;
}

cudaError_t CudaStreamOrder::record_late() noexcept {
    const cudaError_t result = is_late_ ? cudaEventRecord(last_eager_, cudaStreamLegacy) : cudaSuccess;
    if (result == cudaSuccess) is_late_ = false;
    return result;
}

bool CudaStreamOrder::is_idle() noexcept {
    if (eager_stream_ == 0) return true;
    const RelaxedCapture relaxed;
    cudaError_t result = record_late();
    if (result == cudaSuccess) result = cudaEventQuery(last_eager_);
    // Any other result, such as an earlier failure, does not mean that the operation has ended.
    if (result != cudaSuccess) (void)cudaGetLastError();
    return result == cudaSuccess;
}

void CudaStreamOrder::synchronize() {
    if (eager_stream_ == 0) return;
    DeviceGuard guard(device_);
    check_cuda(record_late(), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(last_eager_), "cudaEventSynchronize");
}

}  // namespace crossdock
