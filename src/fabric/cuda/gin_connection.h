// SPDX-License-Identifier: Apache-2.0
// What kernels need to reach other ranks through NCCL's GPU-initiated networking (GIN).
#pragma once

#include <memory>
#include <string>

#include "device/network_handle.h"
#include "fabric/cuda/registered_memory.h"

namespace crossdock {

// The end of a message: what keeps NCCL from giving this rank's kernels a network, as far as can be seen, and what to
// set.
std::string gin_advice_for(const NcclRank& self);

class GinConnection {
  public:
    // Collective: NCCL connects all ranks. Error with ncclInvalidUsage that says what to do where there is no GIN, or
    // one that these kernels do not speak; with ncclRemoteError where some rank does not come before the deadline.
    // Warns where NCCL has fallen back to something else than NCCL_RMA_PLUGIN names.
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
