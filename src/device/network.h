// SPDX-License-Identifier: Apache-2.0
// Peers outside the load/store domain: one-sided operations on their piece of a symmetric allocation. Offsets are from
// the beginning of the pieces; sources lie in this rank's own piece.
//
// Puts are in no order among themselves. A signal is strong: who sees it sees all that this rank has put to that peer
// before. It adds to a word, so signals that overtake each other still add up. One thread a call; threads that share a
// peer order their calls by barriers or acquire-release atomics, with fence_system before the first put of what they
// have written.
#pragma once

#include "device/context.h"
#include "device/network_handle.h"
#if !defined(__CUDACC__)
#include "device/cpu/far_memory.h"
#endif

#if defined(__CUDACC__) && defined(CROSSDOCK_GIN_PEERS)
#include "device/network_gin.cuh"
#endif

namespace crossdock {
inline namespace CROSSDOCK_VARIANT {

#if !defined(__CUDACC__)
// Null: the peer is a rank of this host, and its memory can be written.
inline cpu::FarMemory* way_to(const NetworkHandle& network, int peer) {
    return network.far != nullptr && network.far->is_far(peer) ? network.far : nullptr;
}
#endif

// Bytes from `source` in the own piece to `target` in the peer's. The source stays as it is until flush_network.
CROSSDOCK_DEVICE void put_to_peer([[maybe_unused]] const Ctx& ctx, [[maybe_unused]] const NetworkHandle& network,
                                  [[maybe_unused]] int peer, [[maybe_unused]] uint64_t target,
                                  [[maybe_unused]] uint64_t source, [[maybe_unused]] uint64_t bytes) {
#if !defined(__CUDACC__)
    if (cpu::FarMemory* far = way_to(network, peer)) return far->put(peer, target, network.local + source, bytes);
    ctx.warp().put(peer, network.memory.at(peer, target), network.local + source, bytes);
#elif defined(CROSSDOCK_GIN_PEERS)
    gin::put(network, peer, target, source, bytes);
#endif
}

// Eight bytes at an aligned place, from a register.
CROSSDOCK_DEVICE void put_value_to_peer([[maybe_unused]] const Ctx& ctx, [[maybe_unused]] const NetworkHandle& network,
                                        [[maybe_unused]] int peer, [[maybe_unused]] uint64_t target,
                                        [[maybe_unused]] uint64_t value) {
#if !defined(__CUDACC__)
    if (cpu::FarMemory* far = way_to(network, peer)) return far->put(peer, target, &value, sizeof(value));
    ctx.warp().put_value(peer, reinterpret_cast<uint64_t*>(network.memory.at(peer, target)), value);
#elif defined(CROSSDOCK_GIN_PEERS)
    gin::put_value(network, peer, target, value);
#endif
}

// Adds to a word of the peer's, which the peer reads with load_acquire_system.
CROSSDOCK_DEVICE void signal_peer([[maybe_unused]] const Ctx& ctx, [[maybe_unused]] const NetworkHandle& network,
                                  [[maybe_unused]] int peer, [[maybe_unused]] uint64_t word,
                                  [[maybe_unused]] uint64_t increase) {
#if !defined(__CUDACC__)
    if (cpu::FarMemory* far = way_to(network, peer)) return far->signal(peer, word, increase);
    ctx.warp().signal(peer, reinterpret_cast<uint64_t*>(network.memory.at(peer, word)), increase);
#elif defined(CROSSDOCK_GIN_PEERS)
    gin::signal(network, peer, word, increase);
#endif
}

// put_to_peer and, behind it, signal_peer, as one message where the network can do that.
CROSSDOCK_DEVICE void put_with_signal_to_peer([[maybe_unused]] const Ctx& ctx,
                                              [[maybe_unused]] const NetworkHandle& network, [[maybe_unused]] int peer,
                                              [[maybe_unused]] uint64_t target, [[maybe_unused]] uint64_t source,
                                              [[maybe_unused]] uint64_t bytes, [[maybe_unused]] uint64_t word,
                                              [[maybe_unused]] uint64_t increase) {
#if !defined(__CUDACC__)
    // A put to another host waits in this rank for the signal behind it, and takes it along.
    put_to_peer(ctx, network, peer, target, source, bytes);
    signal_peer(ctx, network, peer, word, increase);
#elif defined(CROSSDOCK_GIN_PEERS)
    gin::put_with_signal(network, peer, target, source, bytes, word, increase);
#endif
}

// The same for put_value_to_peer.
CROSSDOCK_DEVICE void put_value_with_signal_to_peer([[maybe_unused]] const Ctx& ctx,
                                                    [[maybe_unused]] const NetworkHandle& network,
                                                    [[maybe_unused]] int peer, [[maybe_unused]] uint64_t target,
                                                    [[maybe_unused]] uint64_t value, [[maybe_unused]] uint64_t word,
                                                    [[maybe_unused]] uint64_t increase) {
#if !defined(__CUDACC__)
    put_value_to_peer(ctx, network, peer, target, value);
    signal_peer(ctx, network, peer, word, increase);
#elif defined(CROSSDOCK_GIN_PEERS)
    gin::put_value_with_signal(network, peer, target, value, word, increase);
#endif
}

// The sources of all that this rank has put may be overwritten; it may not have arrived yet.
CROSSDOCK_DEVICE void flush_network([[maybe_unused]] const Ctx& ctx, [[maybe_unused]] const NetworkHandle& network) {
#if !defined(__CUDACC__)
    ctx.warp().flush_puts();
#elif defined(CROSSDOCK_GIN_PEERS)
    gin::flush(network);
#endif
}

}  // namespace CROSSDOCK_VARIANT
}  // namespace crossdock
