// SPDX-License-Identifier: Apache-2.0
// One symmetric allocation as ranks of other hosts reach it, whose memory this process cannot map. Offsets are from the
// beginning of the pieces.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crossdock::cpu {

class FarMemory {
  public:
    virtual ~FarMemory() = default;
    virtual bool is_far(int peer) const = 0;
    // The source may be reused when this returns.
    virtual void put(int peer, uint64_t target, const void* source, size_t bytes) = 0;
    // Behind all that was put to the peer.
    virtual void signal(int peer, uint64_t word, uint64_t increase) = 0;
};

}  // namespace crossdock::cpu
