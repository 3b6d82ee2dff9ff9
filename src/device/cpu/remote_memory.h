// SPDX-License-Identifier: Apache-2.0
// One symmetric allocation as ranks of other hosts reach it, whose memory this process cannot map. Offsets are from the
// beginning of the pieces.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/platform.h"  // before whatever opens the namespace cpu

namespace crossdock::network {
struct Operation;
}

namespace crossdock::cpu {

class RemoteMemory;

// Added to a word of the peer's piece of `memory`. Without memory there is none.
struct RemoteSignal {
    const RemoteMemory* memory = nullptr;
    uint64_t word = 0, increase = 0;
    bool is_strong = false;  // it covers all that came before it in its context, not only its own put
};

class RemoteMemory {
  public:
    virtual ~RemoteMemory() = default;
    virtual bool is_remote(int peer) const = 0;
    // The source may be reused when this returns.
    virtual void put(int peer, uint64_t target, const void* source, size_t bytes) = 0;
    // Behind all that was put to the peer.
    virtual void signal(int peer, uint64_t word, uint64_t increase) = 0;

    // GIN: puts and signals of several contexts, each of which orders only itself. Any number of threads. Errors tell
    // that the peer is gone.

    // From now on there are at least that many. Collective.
    virtual void add_contexts(int count) = 0;
    // The source, in this rank's own piece, stays as it is until the operation has ended; has_ended is to be asked
    // until then.
    virtual network::Operation* start_put(int context, int peer, uint64_t target, const RemoteMemory& source,
                                          uint64_t offset, size_t bytes, const RemoteSignal& signal) = 0;
    // From the peer's piece to the own one of target's memory; the bytes are there when the operation has ended.
    virtual network::Operation* start_get(int context, int peer, uint64_t source, const RemoteMemory& target,
                                          uint64_t offset, size_t bytes) = 0;
    virtual bool has_ended(network::Operation* operation) const = 0;
    // At most eight bytes.
    virtual void put_value(int context, int peer, uint64_t target, uint64_t value, size_t bytes,
                           const RemoteSignal& signal) = 0;
    // signal.memory is this.
    virtual void raise(int context, int peer, const RemoteSignal& signal) const = 0;
};

}  // namespace crossdock::cpu
