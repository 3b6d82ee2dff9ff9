// SPDX-License-Identifier: Apache-2.0
// The device communicator with which Crossdock's own kernels use NCCL's Device API on CPUs.
#pragma once

#include <memory>

#include "device/platform.h"  // before whatever opens the namespace cpu

namespace crossdock::cpu {

// An ncclDevComm that says who the ranks are, with one context and nothing else.
std::shared_ptr<const void> make_device_comm(int rank, int num_ranks);

}  // namespace crossdock::cpu
