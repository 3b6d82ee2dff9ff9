// SPDX-License-Identifier: Apache-2.0
// Orders one group's operations across streams.
#pragma once

#include <cuda_runtime.h>

#include "runtime/runtime.h"

namespace crossdock {

// In a captured graph the order becomes edges between operations of one capture. The graph itself is ordered only by
// the stream on which it is launched, because the library does not see graph launches.
class CudaStreamOrder final : public StreamOrder {
  public:
    explicit CudaStreamOrder(int device);
    ~CudaStreamOrder() override;
    CudaStreamOrder(const CudaStreamOrder&) = delete;
    CudaStreamOrder& operator=(const CudaStreamOrder&) = delete;

    bool before_operation(cudaStream_t stream) override;
    void after_operation(cudaStream_t stream, bool rest_follows) override;
    bool is_idle() noexcept override;
    void synchronize() override;

  private:
    // CUDA's ids, which, unlike handles, are unique in a process; 0: none.
    struct Place {
        unsigned long long capture = 0;  // of the stream
        unsigned long long stream = 0;   // queried outside of captures only
    };

    cudaError_t record_late() noexcept;

    int device_;
    // Separate events for eager and captured operations: an event recorded in a capture cannot be queried or waited for
    // outside of it.
    cudaEvent_t last_eager_ = nullptr;
    cudaEvent_t last_captured_ = nullptr;
    Place now_;                            // of the operation being issued
    unsigned long long eager_stream_ = 0;  // of last_eager_
    // last_eager_ is not recorded yet: the rest of an operation on the default stream usually follows there, and that
    // stream, which nobody can destroy, may be recorded later.
    bool is_late_ = false;
    unsigned long long capture_ = 0;  // of last_captured_
};

}  // namespace crossdock
