// SPDX-License-Identifier: Apache-2.0
// How a kernel finds memory of ranks outside its LSA team.
#pragma once

#include "device/peer_map.h"

namespace crossdock {

// What a rank has posted to a peer, and whose turn it is to post.
struct PostQueue {
    uint32_t turn;     // 1: somebody's
    uint32_t posted;   // messages
    uint32_t drained;  // of those: so many sources may be overwritten
    uint32_t reserved;
};

// One symmetric allocation as NCCL's Device API reaches it. Trivially copyable: hosts make it, kernels receive it by
// value.
struct NetworkHandle {
    std::byte* local = nullptr;         // this rank's piece
    PeerMap memory;                     // CPUs: the piece of every rank of this host, for the protocol's checker
    const void* device_comm = nullptr;  // ncclDevComm, in memory that kernels can read
    void* window = nullptr;             // ncclWindow_t
    PostQueue* queues = nullptr;        // [ranks], in device memory; null: threads need not take turns
};

}  // namespace crossdock
