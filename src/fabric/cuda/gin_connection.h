// SPDX-License-Identifier: Apache-2.0
// What kernels need to reach other ranks through NCCL's GPU-initiated networking (GIN).
#pragma once

#include <memory>

#include "fabric/cuda/registered_memory.h"

namespace crossdock {

class GinConnection {
  public:
    // Collective: NCCL connects all ranks. Error with ncclInvalidUsage that says what to do where there is no GIN, or
    // one that these kernels do not speak; with ncclRemoteError where some rank does not come before the deadline.
    static std::unique_ptr<GinConnection> make(const NcclRank& self, Deadline deadline);

    virtual ~GinConnection() = default;
    GinConnection(const GinConnection&) = delete;
    GinConnection& operator=(const GinConnection&) = delete;

    const void* device_comm() const { return device_comm_; }  // ncclDevComm, in device memory

  protected:
    GinConnection() = default;
    void* device_comm_ = nullptr;
};

}  // namespace crossdock
