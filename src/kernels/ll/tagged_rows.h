// SPDX-License-Identifier: Apache-2.0
// Rows in tagged form: what few tokens travel in. A row's 16 bytes become two tagged words; nothing follows the data.
#pragma once

#include "kernels/ll/operation.h"

namespace crossdock {

inline constexpr uint64_t kTaggedRows = uint64_t{1} << (kPayloadBits - 1);  // in a row count: they are in tagged form
// What one warp receives of a tagged row: more warps share a row's latency than its bytes would need.
inline constexpr uint32_t kTaggedSegmentBytes = 512;

inline namespace CROSSDOCK_WORLD {

CROSSDOCK_DEVICE uint32_t tagged_segments(uint32_t bytes) {
    return (bytes + kTaggedSegmentBytes - 1) / kTaggedSegmentBytes;
}

// Which of the blocks that share a row this one is: the part-th of 2^log2_parts.
struct Slice {
    uint32_t part = 0;
    uint32_t log2_parts = 0;
};

// By all threads of the block: bytes [first, first + bytes) of a row to each of its targets, those that are null
// excepted. bytes: a multiple of 16.
CROSSDOCK_DEVICE void store_tagged_rows(const Ctx& ctx, const std::byte* data, uint32_t bytes, const Slice& slice,
                                        std::byte* const* targets, int num_targets, uint32_t first, uint64_t tag) {
    const uint32_t threads = static_cast<uint32_t>(num_threads(ctx));
    CROSSDOCK_ROLLED
    for (uint32_t at = 16 * (slice.part * threads + static_cast<uint32_t>(thread_idx(ctx))); at < bytes;
         at += 16 * threads << slice.log2_parts) {
        const Bytes16 part = *reinterpret_cast<const Bytes16*>(data + at);
        CROSSDOCK_ROLLED
        for (int i = 0; i < num_targets; ++i) {
            if (targets[i] == nullptr) continue;
            TaggedWord* words = reinterpret_cast<TaggedWord*>(targets[i]) + (first + at) / 8;
            ctx.store_tagged(words, part.low, tag);
            ctx.store_tagged(words + 1, part.high, tag);
        }
    }
}

// Two neighbouring words.
struct TaggedPair {
    TaggedWord first;
    TaggedWord second;

    CROSSDOCK_DEVICE static TaggedPair load(const Ctx& ctx, const TaggedWord* words) {
        return {ctx.load_tagged(words), ctx.load_tagged(words + 1)};
    }
    CROSSDOCK_DEVICE bool is_of(const Operation& operation) const {
        return word_epoch(first.tag) == operation.epoch && word_epoch(second.tag) == operation.epoch;
    }
    CROSSDOCK_DEVICE Bytes16 payload() const { return {first.payload, second.payload}; }
};

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
