// SPDX-License-Identifier: Apache-2.0
#include "fabric/cpu/mailbox.h"

#include <algorithm>
#include <cstring>

namespace crossdock::cpu {
namespace {

// The memory orders pair the number with the words: a reader that sees the same number before and after has read words
// of that post only.
void store_words(std::atomic<uint64_t>* words, const void* bytes, size_t num_bytes) {
    for (size_t at = 0; at < num_bytes; at += 8) {
        uint64_t word = 0;
        std::memcpy(&word, static_cast<const std::byte*>(bytes) + at, std::min<size_t>(8, num_bytes - at));
        words[at / 8].store(word, std::memory_order_release);
    }
}

void load_words(void* bytes, const std::atomic<uint64_t>* words, size_t num_bytes) {
    for (size_t at = 0; at < num_bytes; at += 8) {
        const uint64_t word = words[at / 8].load(std::memory_order_acquire);
        std::memcpy(static_cast<std::byte*>(bytes) + at, &word, std::min<size_t>(8, num_bytes - at));
    }
}

}  // namespace

uint64_t Mailbox::latest() const {
    return std::max(posts_[0].number.load(std::memory_order_acquire), posts_[1].number.load(std::memory_order_acquire));
}

uint64_t Mailbox::replaced_next() const {
    return std::min(posts_[0].number.load(std::memory_order_relaxed), posts_[1].number.load(std::memory_order_relaxed));
}

void Mailbox::post(uint64_t number, const Label& label, const void* chunk, size_t chunk_bytes) {
    Post& post = posts_[posts_[0].number.load(std::memory_order_relaxed) == replaced_next() ? 0 : 1];
    post.number.store(0, std::memory_order_relaxed);
    store_words(post.words, &label, sizeof(label));
    store_words(post.words + kLabelWords, chunk, chunk_bytes);
    post.number.store(number, std::memory_order_release);
}

Mailbox::Seen Mailbox::read(uint64_t number, Label& label, void* chunk, size_t chunk_bytes) const {
    // Twice: the post may appear in the place already checked, and its successor in the other one. A reader that sees a
    // later post finds this one in the second round, unless it was overwritten.
    for (int look = 0; look < 2; ++look) {
        uint64_t latest = 0;
        for (const Post& post : posts_) {
            const uint64_t seen = post.number.load(std::memory_order_acquire);
            latest = std::max(latest, seen);
            if (seen != number) continue;
            Label found;
            std::byte bytes[kChunkBytes];
            load_words(&found, post.words, sizeof(found));
            load_words(bytes, post.words + kLabelWords, chunk_bytes);
            if (post.number.load(std::memory_order_relaxed) != number) return Seen::kGone;
            label = found;
            if (chunk_bytes > 0) std::memcpy(chunk, bytes, chunk_bytes);
            return Seen::kRead;
        }
        if (latest < number) return Seen::kNotYet;
    }
    return Seen::kGone;
}

}  // namespace crossdock::cpu
