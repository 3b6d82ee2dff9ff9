// SPDX-License-Identifier: Apache-2.0
// Rows in tagged form: what few tokens travel in. A row's 16 bytes become two tagged words; nothing follows the data.
#pragma once

#include "kernels/ll/operation.h"

namespace crossdock {

inline constexpr uint64_t kTaggedRows = uint64_t{1} << (kPayloadBits - 1);  // in a row count: they are in tagged form
inline constexpr uint32_t kMaxRowsOfSource = kTaggedRows - 1;
// What one warp receives of a tagged row: more warps share a row's latency than its bytes would need.
inline constexpr uint32_t kTaggedSegmentBytes = 512;

inline namespace CROSSDOCK_WORLD {

CROSSDOCK_DEVICE uint32_t tagged_segments(uint32_t bytes) {
    return (bytes + kTaggedSegmentBytes - 1) / kTaggedSegmentBytes;
}

// By all threads of the block: bytes [first, first + bytes) of a row to each of its targets, those that are null
// excepted. bytes: a multiple of 16.
CROSSDOCK_DEVICE void store_tagged_rows(const Ctx& ctx, const std::byte* data, uint32_t bytes, std::byte* const* targets,
                                        int num_targets, uint32_t first, uint64_t tag) {
    CROSSDOCK_ROLLED
    for (uint32_t at = 16 * static_cast<uint32_t>(thread_idx(ctx)); at < bytes;
         at += 16 * static_cast<uint32_t>(num_threads(ctx))) {
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
    // After a first look: until both are of this operation. False: they will not come.
    CROSSDOCK_DEVICE bool wait(const Ctx& ctx, const LlCommon& c, const Operation& operation, int source,
                               const TaggedWord* words) {
        if (is_of(operation)) return true;
        return wait_until(
            ctx, c.scope, operation, WaitStep::kRow, source, operation.epoch,
            [&] {
                *this = load(ctx, words);
                return is_of(operation) ? operation.epoch : word_epoch(first.tag);
            },
            [&](uint64_t) { return is_of(operation); });
    }
};

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
