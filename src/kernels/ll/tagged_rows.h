// SPDX-License-Identifier: Apache-2.0
// Rows in tagged form: what few tokens travel in. A row's 16 bytes become two tagged words; nothing follows the data.
#pragma once

#include "kernels/ll/operation.h"

namespace crossdock {

inline constexpr uint64_t kTaggedRows = uint64_t{1} << (kPayloadBits - 1);  // in a row count: they are in tagged form
inline constexpr uint32_t kMaxRowsOfSource = kTaggedRows - 1;
// What one warp receives of a tagged row: more warps share a row's latency than its bytes would need.
inline constexpr uint32_t kTaggedSegmentBytes = 1024;

inline namespace CROSSDOCK_WORLD {

CROSSDOCK_DEVICE uint32_t tagged_segments(uint32_t bytes) {
    return (bytes + kTaggedSegmentBytes - 1) / kTaggedSegmentBytes;
}

// By all threads of the block. bytes: a multiple of 16.
CROSSDOCK_DEVICE void store_tagged_row(const Ctx& ctx, const std::byte* row, uint32_t bytes, TaggedWord* words,
                                       uint64_t tag) {
    for (uint32_t at = 16 * static_cast<uint32_t>(thread_idx(ctx)); at < bytes;
         at += 16 * static_cast<uint32_t>(num_threads(ctx))) {
        const Bytes16 part = *reinterpret_cast<const Bytes16*>(row + at);
        ctx.store_tagged(words + at / 8, part.low, tag);
        ctx.store_tagged(words + at / 8 + 1, part.high, tag);
    }
}

// Waits for two neighbouring words. False: they will not come.
CROSSDOCK_DEVICE bool wait_tagged_pair(const Ctx& ctx, const LlCommon& c, const Operation& operation, int source,
                                       const TaggedWord* words, Bytes16& part, uint64_t& tag) {
    TaggedWord first = ctx.load_tagged(words);
    TaggedWord second = ctx.load_tagged(words + 1);
    const auto arrived = [&] {
        return word_epoch(first.tag) == operation.epoch && word_epoch(second.tag) == operation.epoch;
    };
    if (!arrived()) {
        const bool came = wait_until(
            ctx, c.scope, operation, WaitStep::kRow, source, operation.epoch,
            [&] {
                first = ctx.load_tagged(words);
                second = ctx.load_tagged(words + 1);
                return arrived() ? operation.epoch : word_epoch(first.tag);
            },
            [&](uint64_t) { return arrived(); });
        if (!came) return false;
    }
    part = {first.payload, second.payload};
    tag = first.tag;
    return true;
}

}  // namespace CROSSDOCK_WORLD
}  // namespace crossdock
