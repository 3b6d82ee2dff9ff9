// SPDX-License-Identifier: Apache-2.0
// How the ranks of a CPU world exchange small host data: every rank has a mailbox that it alone writes and all others
// read, in memory that all of them map. Words are atomic, so it serves threads and processes alike. All zero is a fresh
// segment.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "device/platform.h"

namespace crossdock::cpu {

// The two latest posts of a rank. A rank posts its next piece of a collective only after everybody has posted the last
// one, so nobody can still need the post before that - unless a rank has given up waiting; then readers find the post
// gone.
class Mailbox {
  public:
    static constexpr size_t kChunkBytes = 4096;

    // What every post says about itself, so that ranks that are in different collectives notice.
    struct Label {
        uint64_t total_bytes = 0;  // of the whole collective, a rank
        char what[56] = {};        // 0-terminated
        bool operator==(const Label&) const = default;
    };

    enum class Seen { kNotYet, kRead, kGone };

    // Owner only. Numbers grow from post to post, from 1.
    void post(uint64_t number, const Label& label, const void* chunk, size_t chunk_bytes);
    // Any rank. Writes its outputs only with kRead; chunk_bytes at most kChunkBytes.
    Seen read(uint64_t number, Label& label, void* chunk, size_t chunk_bytes) const;

  private:
    static constexpr size_t kLabelWords = sizeof(Label) / 8;
    struct Post {
        std::atomic<uint64_t> number;  // 0: being written
        std::atomic<uint64_t> words[kLabelWords + kChunkBytes / 8];
    };
    Post posts_[2];
};

// The memory that all ranks of a communicator map.
class ControlSegment {
  public:
    static constexpr int kMaxRanks = 4096;
    static constexpr size_t bytes(int num_ranks) {
        return sizeof(ControlSegment) + static_cast<size_t>(num_ranks) * sizeof(RankPart);
    }

    static constexpr int kNonceOffset = 0;
    std::atomic<uint64_t> nonce;      // the one in the id, between processes
    std::atomic<uint64_t> num_ranks;  // 0 until the first rank joins
    std::atomic<uint64_t> reserved[6];

    std::atomic<uint64_t>& process_of(int rank) { return part(rank).process; }  // 0: has not joined
    Mailbox& mailbox_of(int rank) { return part(rank).mailbox; }

  private:
    struct alignas(64) RankPart {
        std::atomic<uint64_t> process;
        Mailbox mailbox;
    };
    RankPart& part(int rank) { return reinterpret_cast<RankPart*>(this + 1)[rank]; }
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "mailboxes are shared between processes");
static_assert(sizeof(ControlSegment) == 64 && std::is_standard_layout_v<ControlSegment>);

}  // namespace crossdock::cpu
