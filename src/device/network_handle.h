// SPDX-License-Identifier: Apache-2.0
// How a kernel finds memory of ranks outside its LSA team.
#pragma once

#include "device/peer_map.h"

namespace crossdock {

// One symmetric allocation as NCCL's Device API reaches it. Trivially copyable: hosts make it, kernels receive it by
// value.
struct NetworkHandle {
    std::byte* local = nullptr;         // this rank's piece
    PeerMap memory;                     // CPUs: the piece of every rank of this host, for the protocol's checker
    const void* device_comm = nullptr;  // ncclDevComm, in memory that kernels can read
    void* window = nullptr;             // ncclWindow_t
};

}  // namespace crossdock
