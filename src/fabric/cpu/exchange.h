// SPDX-License-Identifier: Apache-2.0
// Exchanges small host data between the ranks of a CPU communicator: every rank posts pieces and reads those of all.
#pragma once

#include <cstddef>
#include <cstdint>

namespace crossdock::cpu {

// Label of a post, which detects ranks that are in different collectives.
struct PostLabel {
    uint64_t total_bytes = 0;  // of the whole collective, per rank
    char what[56] = {};        // 0-terminated
    bool operator==(const PostLabel&) const = default;
};

enum class PostSeen { kNotYet, kRead, kGone };

inline constexpr size_t kPostBytes = 4096;  // maximum size of a piece

class Exchange {
  public:
    virtual ~Exchange() = default;
    // False while the rank may still need one of this rank's posts that the next one replaces.
    virtual bool has_read(int rank) = 0;
    // Numbers start at 1 and grow from post to post. All ranks have read what it replaces.
    virtual void post(uint64_t number, const PostLabel& label, const void* chunk, size_t chunk_bytes) = 0;
    // Reads a post of any rank, including this one. Writes its outputs only with kRead.
    virtual PostSeen read(int rank, uint64_t number, PostLabel& label, void* chunk, size_t chunk_bytes) = 0;
    // True if the rank has left in order.
    virtual bool has_left(int rank) = 0;
    // Tells all ranks, before it returns, that this rank fails because it has lost `lost`; -1: that this is over.
    virtual void report_loss(int lost) = 0;
    // The rank whose loss `rank` has reported, also after its end; -1: none.
    virtual int reported_loss(int rank) = 0;
};

}  // namespace crossdock::cpu
