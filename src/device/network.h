// SPDX-License-Identifier: Apache-2.0
// Puts and signals to GIN peers: NCCL's GPU-initiated networking (GIN) on their pieces of a symmetric allocation. GPUs
// use NCCL's header, CPUs ours. Offsets are from the beginning of the pieces; sources lie in this rank's own piece.
//
// Puts are not ordered among themselves. A signal is strong: a peer that sees it sees everything that this rank put to
// it before. It adds to a word, so signals may overtake each other. One thread per call; threads that share a peer
// order their calls by barriers or acquire-release atomics, with fence_system before the first put of what they have
// written.
//
// A context orders only its own operations, so all operations to a peer use one context. Signals are words of the
// window (VA signals), which the peer reads with load_acquire_system, so their number need not be requested beforehand.
#pragma once

#include "device/network_handle.h"

#if defined(CROSSDOCK_GIN_PEERS)
#include "crossdock/device/kernel.hpp"

namespace crossdock {
namespace {

CROSSDOCK_DEVICE const ncclDevComm& comm_of(const NetworkHandle& network) {
    return *static_cast<const ncclDevComm*>(network.device_comm);
}
CROSSDOCK_DEVICE ncclWindow_t window_of(const NetworkHandle& network) {
    return static_cast<ncclWindow_t>(network.window);
}
CROSSDOCK_DEVICE int context_of(const NetworkHandle& network, int peer) {
    return peer % static_cast<int>(comm_of(network).ginContextCount);
}

// A thread's turn to post to a peer, or to wait for what was posted. NCCL's proxy keeps its counters in host memory,
// and GPU threads that poll them slow down the copies that they wait for: a copy took 490 us instead of 5 while 120
// threads polled. So one thread polls, and the others wait for it in device memory.
class PostTurn {
  public:
    using Word = ::cuda::atomic_ref<uint32_t, ::cuda::thread_scope_device>;

    CROSSDOCK_DEVICE PostTurn(const NetworkHandle& network, int peer)
        : queue_(network.queues == nullptr ? nullptr : network.queues + peer) {
        if (queue_ == nullptr) return;
        Word turn(queue_->turn);
        while (turn.load(::cuda::memory_order_relaxed) != 0 || turn.exchange(1, ::cuda::memory_order_acquire) != 0)
            __nanosleep(50);
    }
    CROSSDOCK_DEVICE ~PostTurn() {
        if (queue_ != nullptr) Word(queue_->turn).store(0, ::cuda::memory_order_release);
    }
    PostTurn(const PostTurn&) = delete;
    PostTurn& operator=(const PostTurn&) = delete;

    CROSSDOCK_DEVICE void count() const {
        if (queue_ != nullptr) Word(queue_->posted).fetch_add(1, ::cuda::memory_order_relaxed);
    }

  private:
    PostQueue* queue_;
};

// Waits until the sources of everything posted to the peer may be overwritten.
CROSSDOCK_DEVICE void drain(const NetworkHandle& network, int peer) {
    using Word = PostTurn::Word;
    PostQueue& queue = network.queues[peer];
    const uint32_t posted = Word(queue.posted).load(::cuda::memory_order_relaxed);
    const auto is_drained = [&] {
        return static_cast<int32_t>(Word(queue.drained).load(::cuda::memory_order_acquire) - posted) >= 0;
    };
    if (is_drained()) return;
    const PostTurn turn(network, peer);
    if (is_drained()) return;
    const uint32_t all = Word(queue.posted).load(::cuda::memory_order_relaxed);
    const ncclDevComm& comm = comm_of(network);
    const ncclGin gin(comm, context_of(network, peer));
    ncclGinRequest_t request;
    gin.flushAsync(ncclTeamWorld(comm), static_cast<uint32_t>(peer), &request);
    gin.wait(request);
    Word(queue.drained).store(all, ::cuda::memory_order_release);
}

// Not inlined on GPUs: a call costs little compared to a message, and the kernels have few registers to spare.

// Puts bytes from `source` in the own piece to `target` in the peer's. The source stays unchanged until flush_network.
CROSSDOCK_DEVICE_RARE void put_to_peer(const NetworkHandle& network, int peer, uint64_t target, uint64_t source,
                                       uint64_t bytes) {
    const ncclDevComm& comm = comm_of(network);
    const ncclGin gin(comm, context_of(network, peer));
    const PostTurn turn(network, peer);
    turn.count();
    gin.put(ncclTeamWorld(comm), peer, window_of(network), target, window_of(network), source, bytes);
}

// Puts eight bytes, passed by value, to an aligned target.
CROSSDOCK_DEVICE_RARE void put_value_to_peer(const NetworkHandle& network, int peer, uint64_t target, uint64_t value) {
    const ncclDevComm& comm = comm_of(network);
    const ncclGin gin(comm, context_of(network, peer));
    const PostTurn turn(network, peer);
    turn.count();
    gin.putValue(ncclTeamWorld(comm), peer, window_of(network), target, value);
}

// put_to_peer followed by signal_peer, as one message.
CROSSDOCK_DEVICE_RARE void put_with_signal_to_peer(const NetworkHandle& network, int peer, uint64_t target,
                                                   uint64_t source, uint64_t bytes, uint64_t word, uint64_t increase) {
    const ncclDevComm& comm = comm_of(network);
    const ncclGin gin(comm, context_of(network, peer));
    const PostTurn turn(network, peer);
    turn.count();
    gin.put(ncclTeamWorld(comm), peer, window_of(network), target, window_of(network), source, bytes,
            ncclGin_StrongVASignalAdd{window_of(network), word, increase});
}

// The same for put_value_to_peer.
CROSSDOCK_DEVICE_RARE void put_value_with_signal_to_peer(const NetworkHandle& network, int peer, uint64_t target,
                                                         uint64_t value, uint64_t word, uint64_t increase) {
    const ncclDevComm& comm = comm_of(network);
    const ncclGin gin(comm, context_of(network, peer));
    const PostTurn turn(network, peer);
    turn.count();
    gin.putValue(ncclTeamWorld(comm), peer, window_of(network), target, value,
                 ncclGin_StrongVASignalAdd{window_of(network), word, increase});
}

// Adds to a word of the peer.
CROSSDOCK_DEVICE_RARE void signal_peer(const NetworkHandle& network, int peer, uint64_t word, uint64_t increase) {
    const ncclDevComm& comm = comm_of(network);
    const ncclGin gin(comm, context_of(network, peer));
    const PostTurn turn(network, peer);
    turn.count();
    gin.signal(ncclTeamWorld(comm), peer, ncclGin_StrongVASignalAdd{window_of(network), word, increase});
}

// Waits until the sources of everything this rank has put may be overwritten; it may not have arrived yet.
CROSSDOCK_DEVICE_RARE void flush_network(const NetworkHandle& network) {
    const ncclDevComm& comm = comm_of(network);
    if (network.queues != nullptr) {
        for (int peer = 0; peer < ncclTeamWorld(comm).nRanks; ++peer) drain(network, peer);
        return;
    }
    for (int context = 0; context < static_cast<int>(comm.ginContextCount); ++context) {
        const ncclGin gin(comm, context);
        gin.flush(ncclCoopThread{});
    }
}

}  // namespace
}  // namespace crossdock

#else

namespace crossdock {
namespace {

// All peers are in the LSA team: never called.
CROSSDOCK_DEVICE void put_to_peer(const NetworkHandle&, int, uint64_t, uint64_t, uint64_t) {}
CROSSDOCK_DEVICE void put_value_to_peer(const NetworkHandle&, int, uint64_t, uint64_t) {}
CROSSDOCK_DEVICE void put_with_signal_to_peer(const NetworkHandle&, int, uint64_t, uint64_t, uint64_t, uint64_t,
                                              uint64_t) {}
CROSSDOCK_DEVICE void put_value_with_signal_to_peer(const NetworkHandle&, int, uint64_t, uint64_t, uint64_t, uint64_t) {
}
CROSSDOCK_DEVICE void signal_peer(const NetworkHandle&, int, uint64_t, uint64_t) {}
CROSSDOCK_DEVICE void flush_network(const NetworkHandle&) {}

}  // namespace
}  // namespace crossdock

#endif
