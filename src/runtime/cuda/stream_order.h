// SPDX-License-Identifier: Apache-2.0
// One group's operations one after the other, whichever streams they are issued on.
#pragma once

#include <cuda_runtime.h>

#include "runtime/runtime.h"

namespace crossdock {

// In a captured graph the order becomes edges between operations of one capture. A graph as a whole is ordered by the
// stream that it is launched on alone, since launches are not seen here.
class CudaStreamOrder final : public StreamOrder {
  public:
    explicit CudaStreamOrder(int device);
    ~CudaStreamOrder() override;
    CudaStreamOrder(const CudaStreamOrder&) = delete;
    CudaStreamOrder& operator=(const CudaStreamOrder&) = delete;

    bool before_operation(cudaStream_t stream) override;
    void after_operation(cudaStream_t stream) override;
    bool is_idle() noexcept override;
    void synchronize() override;

  private:
    // CUDA's numbers, which it does not use twice in a process, as it does handles; 0: none.
    struct Place {
        unsigned long long capture = 0;  // that the stream takes part in
        unsigned long long stream = 0;   // asked for outside of captures only
    };

    int device_;
    // Eager and captured operations have an event each: an event that was recorded in a capture cannot be asked or
    // waited for outside of it.
    cudaEvent_t last_eager_ = nullptr;
    cudaEvent_t last_captured_ = nullptr;
    Place now_;                            // where the operation goes that is being issued
    unsigned long long eager_stream_ = 0;  // that last_eager_ was recorded on
    unsigned long long capture_ = 0;       // that last_captured_ belongs to
};

}  // namespace crossdock
