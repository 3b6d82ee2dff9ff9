// SPDX-License-Identifier: Apache-2.0
// The exchange of CPU ranks that share memory: every rank has a mailbox that only it writes and all others read, in
// memory that all map. Words are atomic, so it works for threads and processes. A zeroed segment is empty.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

#include "device/platform.h"
#include "fabric/cpu/exchange.h"

namespace crossdock::cpu {

// The two latest posts of a rank. Its next post replaces the older one, once all ranks have posted a later number: they
// do not need it any more. Readers get kGone for a post that its rank has left out, since it timed out.
class Mailbox {
  public:
    static constexpr size_t kChunkBytes = kPostBytes;
    using Label = PostLabel;
    using Seen = PostSeen;

    // Owner only. Numbers start at 1 and grow from post to post.
    void post(uint64_t number, const Label& label, const void* chunk, size_t chunk_bytes);
    // Any rank. Writes its outputs only with kRead; chunk_bytes at most kChunkBytes.
    Seen read(uint64_t number, Label& label, void* chunk, size_t chunk_bytes) const;
    uint64_t latest() const;  // 0: none
    // Owner only. The number of the post that the next one replaces; 0: none.
    uint64_t replaced_next() const;

  private:
    static constexpr size_t kLabelWords = sizeof(Label) / 8;
    struct Post {
        std::atomic<uint64_t> number;  // 0: being written
        std::atomic<uint64_t> words[kLabelWords + kChunkBytes / 8];
    };
    Post posts_[2];
};

// Memory that all ranks of a communicator map.
class ControlSegment {
  public:
    static constexpr int kMaxRanks = 4096;
    static constexpr size_t bytes(int num_ranks) {
        return sizeof(ControlSegment) + static_cast<size_t>(num_ranks) * sizeof(RankPart);
    }

    static constexpr int kNonceOffset = 0;
    static constexpr int kIsCompleteOffset = 24;
    std::atomic<uint64_t> nonce;        // that of the id; between processes only
    std::atomic<uint64_t> num_ranks;    // 0 until the first rank joins
    std::atomic<uint64_t> join_lock;    // to_word() of the process that holds it; 0: none
    std::atomic<uint64_t> is_complete;  // 1: all have joined, and processes do not change any more
    std::atomic<uint64_t> reserved[4];

    std::atomic<uint64_t>& process_of(int rank) { return part(rank).process; }  // to_word(); 0: has not joined
    std::atomic<uint64_t>& left(int rank) { return part(rank).left; }           // 1: has destroyed its communicator
    std::atomic<uint64_t>& lost_by(int rank) { return part(rank).lost; }  // 1 + the rank whose loss it reports; 0: none
    Mailbox& mailbox_of(int rank) { return part(rank).mailbox; }

  private:
    struct alignas(64) RankPart {
        std::atomic<uint64_t> process;
        std::atomic<uint64_t> left;
        std::atomic<uint64_t> lost;
        Mailbox mailbox;
    };
    RankPart& part(int rank) { return reinterpret_cast<RankPart*>(this + 1)[rank]; }
};

class MailboxExchange final : public Exchange {
  public:
    MailboxExchange(std::shared_ptr<ControlSegment> control, int rank) : control_(std::move(control)), rank_(rank) {}
    ~MailboxExchange() override { control_->left(rank_).store(1, std::memory_order_release); }
    void post(uint64_t number, const PostLabel& label, const void* chunk, size_t chunk_bytes) override {
        control_->mailbox_of(rank_).post(number, label, chunk, chunk_bytes);
    }
    bool has_read(int rank) override {
        const uint64_t replaced = control_->mailbox_of(rank_).replaced_next();
        return replaced == 0 || control_->mailbox_of(rank).latest() > replaced;
    }
    PostSeen read(int rank, uint64_t number, PostLabel& label, void* chunk, size_t chunk_bytes) override {
        return control_->mailbox_of(rank).read(number, label, chunk, chunk_bytes);
    }
    bool has_left(int rank) override { return control_->left(rank).load(std::memory_order_acquire) == 1; }
    void report_loss(int lost) override {
        control_->lost_by(rank_).store(static_cast<uint64_t>(lost + 1), std::memory_order_release);
    }
    int reported_loss(int rank) override {
        const uint64_t word = control_->lost_by(rank).load(std::memory_order_acquire);
        return word <= ControlSegment::kMaxRanks ? static_cast<int>(word) - 1 : -1;
    }

  private:
    std::shared_ptr<ControlSegment> control_;
    int rank_;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "mailboxes are shared between processes");
static_assert(sizeof(ControlSegment) == 64 && std::is_standard_layout_v<ControlSegment>);
static_assert(offsetof(ControlSegment, nonce) == ControlSegment::kNonceOffset &&
              offsetof(ControlSegment, is_complete) == ControlSegment::kIsCompleteOffset);

}  // namespace crossdock::cpu
