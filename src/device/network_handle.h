// SPDX-License-Identifier: Apache-2.0
// How a kernel finds the memory of GIN peers.
#pragma once

#include "device/peer_map.h"

namespace crossdock {

// What a rank has posted to a peer, and the lock for posting.
struct PostQueue {
    uint32_t turn;     // 1: taken by a thread
    uint32_t posted;   // messages; the count wraps around
    uint32_t drained;  // the sources of this many of them may be overwritten; at most an operation's behind
    uint32_t reserved;
};

// A symmetric allocation for NCCL's Device API. Trivially copyable: hosts make it, kernels receive it by value.
struct NetworkHandle {
    std::byte* local = nullptr;         // this rank's piece
    PeerMap memory;                     // CPUs: the pieces of this host's ranks, for the protocol checker
    const void* device_comm = nullptr;  // ncclDevComm, in memory that kernels can read
    void* window = nullptr;             // ncclWindow_t
    PostQueue* queues = nullptr;        // [ranks], in device memory; null: threads need not take turns
};

}  // namespace crossdock
