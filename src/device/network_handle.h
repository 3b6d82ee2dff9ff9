// SPDX-License-Identifier: Apache-2.0
// How a kernel finds memory of ranks outside its load/store domain.
#pragma once

#include "device/peer_map.h"

namespace crossdock {

namespace cpu {
class FarMemory;
}

// One symmetric allocation as the network reaches it. Trivially copyable: hosts make it, kernels receive it by value.
struct NetworkHandle {
    std::byte* local = nullptr;         // this rank's piece
    PeerMap memory;                     // CPUs: the piece of every rank of this host
    cpu::FarMemory* far = nullptr;      // CPUs: the way to those of other hosts; null: there are none
    const void* device_comm = nullptr;  // GPUs: ncclDevComm, in device memory
    void* window = nullptr;             // GPUs: ncclWindow_t
};

}  // namespace crossdock
