// SPDX-License-Identifier: Apache-2.0
#include "fabric/cuda/mailbox_put.h"

#include "device/network.h"
#include "runtime/cuda/launch.cuh"

namespace crossdock::cuda {
namespace {

__global__ void crossdock_mailbox_put(const __grid_constant__ MailboxPut put) {
    for (int peer = static_cast<int>(threadIdx.x); peer < put.num_ranks; peer += static_cast<int>(blockDim.x)) {
        if (peer >= put.first_of_team && peer < put.end_of_team) continue;
        if (put.bytes > 0) put_to_peer(put.network, peer, put.slot, put.slot, put.bytes);
        signal_peer(put.network, peer, put.flag, put.increase);
    }
}

}  // namespace

void launch_mailbox_put(const MailboxPut& put, cudaStream_t stream) {
    launch<crossdock_mailbox_put>(put, {}, stream, "the exchange between LSA teams");
}

}  // namespace crossdock::cuda
