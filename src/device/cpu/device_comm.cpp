// SPDX-License-Identifier: Apache-2.0
#include "device/cpu/device_comm.h"

#include "crossdock/device/core.hpp"

namespace crossdock::cpu {

std::shared_ptr<const void> make_device_comm(int rank, int num_ranks) {
    ncclDevComm comm = {};
    comm.rank = rank;
    comm.nRanks = num_ranks;
    comm.ginContextCount = 1;
    return std::make_shared<const ncclDevComm>(comm);
}

}  // namespace crossdock::cpu
