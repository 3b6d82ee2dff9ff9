// SPDX-License-Identifier: Apache-2.0
// The device communicator with which Crossdock's own kernels use NCCL's Device API on CPUs.
#pragma once

#include <memory>

#include "device/platform.h"  // before any header that opens the namespace cpu

namespace crossdock::cpu {

// An ncclDevComm with rank, number of ranks and one context; everything else is empty.
std::shared_ptr<const void> make_device_comm(int rank, int num_ranks);

}  // namespace crossdock::cpu
