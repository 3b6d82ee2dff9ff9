// SPDX-License-Identifier: Apache-2.0
// Connects kernels to other ranks through NCCL's GPU-initiated networking (GIN).
#pragma once

#include <memory>
#include <string>

#include "device/network_handle.h"
#include "fabric/cuda/registered_memory.h"

namespace crossdock {

// Message suffix: why NCCL gives this rank's kernels no network, as far as known, and what to set.
std::string gin_advice_for(const NcclRank& self);

class GinConnection {
  public:
    // Collective: NCCL connects all ranks. Throws ncclInvalidUsage that says what to do if there is no GIN, or a
    // version that these kernels do not support, and ncclRemoteError if a rank is missing at the deadline. Warns if
    // NCCL does not use the plugin that NCCL_RMA_PLUGIN names, or uses Crossdock's while CUDA loads kernels lazily.
    static std::unique_ptr<GinConnection> make(const NcclRank& self, Deadline deadline);

    virtual ~GinConnection() = default;
    GinConnection(const GinConnection&) = delete;
    GinConnection& operator=(const GinConnection&) = delete;

    const void* device_comm() const { return device_comm_; }  // ncclDevComm, in device memory
    PostQueue* queues() const { return queues_; }             // [ranks], likewise

  protected:
    GinConnection() = default;
    void* device_comm_ = nullptr;
    PostQueue* queues_ = nullptr;
};

}  // namespace crossdock
