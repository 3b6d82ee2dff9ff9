// SPDX-License-Identifier: Apache-2.0
#include "runtime/cuda/stream_order.h"

#include "runtime/cuda/cuda_check.h"

namespace crossdock {
namespace {

// The number of the capture that the stream takes part in; 0: none. Numbers, like those of streams, are not used twice
// in a process, as handles are.
unsigned long long capture_of(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long number = 0;
    check_cuda(cudaStreamGetCaptureInfo(stream, &status, &number), "cudaStreamGetCaptureInfo");
    return status == cudaStreamCaptureStatusActive ? number : 0;
}

unsigned long long number_of(cudaStream_t stream) {
    unsigned long long number = 0;
    check_cuda(cudaStreamGetId(stream, &number), "cudaStreamGetId");
    return number;
}

}  // namespace

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

void CudaStreamOrder::before_operation(cudaStream_t stream) {
    DeviceGuard guard(device_);
    if (const unsigned long long capture = capture_of(stream)) {
        if (capture == capture_) check_cuda(cudaStreamWaitEvent(stream, last_captured_), "cudaStreamWaitEvent");
    } else if (eager_stream_ != 0 && number_of(stream) != eager_stream_) {
        check_cuda(cudaStreamWaitEvent(stream, last_eager_), "cudaStreamWaitEvent");
    }
}

void CudaStreamOrder::after_operation(cudaStream_t stream) {
    DeviceGuard guard(device_);
    if (const unsigned long long capture = capture_of(stream)) {
        check_cuda(cudaEventRecord(last_captured_, stream), "cudaEventRecord");
        capture_ = capture;
    } else {
        check_cuda(cudaEventRecord(last_eager_, stream), "cudaEventRecord");
        eager_stream_ = number_of(stream);
    }
}

bool CudaStreamOrder::is_idle() {
    if (eager_stream_ == 0) return true;
    DeviceGuard guard(device_);
    const cudaError_t result = cudaEventQuery(last_eager_);
    if (result == cudaErrorNotReady) (void)cudaGetLastError();
    return result != cudaErrorNotReady;  // a device that failed runs nothing
}

}  // namespace crossdock
