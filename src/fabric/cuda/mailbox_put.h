// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include "device/network_handle.h"

namespace crossdock {

// Puts this rank's bytes of a round, and its flag, to every rank of other LSA teams.
struct MailboxPut {
    NetworkHandle network;
    int num_ranks;
    int first_of_team;
    int end_of_team;
    uint64_t slot;  // offset in every rank's memory
    uint64_t bytes;
    uint64_t flag;
    uint64_t increase;
};

namespace cuda {
void launch_mailbox_put(const MailboxPut& put, cudaStream_t stream);
}

}  // namespace crossdock
