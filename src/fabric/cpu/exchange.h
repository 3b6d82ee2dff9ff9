// SPDX-License-Identifier: Apache-2.0
// How the ranks of a CPU communicator hand each other small host data: every rank posts pieces, and reads those of all.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crossdock::cpu {

// What every post says about itself, so that ranks that are in different collectives notice.
struct PostLabel {
    uint64_t total_bytes = 0;  // of the whole collective, a rank
    char what[56] = {};        // 0-terminated
    bool operator==(const PostLabel&) const = default;
};

enum class PostSeen { kNotYet, kRead, kGone };

inline constexpr size_t kPostBytes = 4096;  // of a piece, at most

class Exchange {
  public:
    virtual ~Exchange() = default;
    // Numbers grow from post to post, from 1.
    virtual void post(uint64_t number, const PostLabel& label, const void* chunk, size_t chunk_bytes) = 0;
    // Any rank's, this one's included. Writes its outputs only with kRead.
    virtual PostSeen read(int rank, uint64_t number, PostLabel& label, void* chunk, size_t chunk_bytes) = 0;
    // The rank's exchange has ended in order.
    virtual bool has_left(int rank) = 0;
};

}  // namespace crossdock::cpu
